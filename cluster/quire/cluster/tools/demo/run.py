"""``quire demo``: starts a cluster on this machine, asks a few questions, and prints their cost."""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import grpc

from quire import demo_model
from quire.cluster.cli.columns import terminal_width
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import Endpoints, running_cluster
from quire.cluster.deploy.progress import Progress
from quire.cluster.tools.generate import chat_request, generate
from quire.v1 import inference_pb2 as pb

NUM_STREAMED = 3
"""Questions asked one after the other; each answer is streamed to the terminal."""
NUM_TOGETHER = 6
"""Questions then asked concurrently; every second one goes to another assistant."""
OTHER_SYSTEM_PROMPT = (
    "You are the night porter of a small hotel by the sea. Guests come to you with all kinds of "
    "questions, about words, about the world and about the computers in the cellar. Answer each "
    "of them politely, in one or two plain sentences. When you do not know an answer, say that "
    "you do not know it."
)
"""A second shared prefix, which is cached separately."""
# Enough for every question here, and small enough for a laptop.
_KV_CACHE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result and the cost of one question."""

    question: str
    text: str
    routing: pb.Routing
    usage: pb.Usage

    @property
    def tokens_per_s(self) -> float:
        """Decode speed alone: the first token belongs to the prefill."""
        decode_s = self.usage.total_time_s - self.usage.time_to_first_token_s
        return (self.usage.num_output_tokens - 1) / decode_s if decode_s > 0 else 0.0


def run_demo(
    config: ClusterConfig, *, name: str | None, ray_address: str | None, progress: Progress
) -> int:
    """Starts the cluster, asks, prints, and stops the cluster; returns the process's exit
    status."""
    engine = config.engine
    if engine.kv_cache_memory_bytes is None and engine.gpu_memory_utilization is None:
        engine = replace(engine, kv_cache_memory_bytes=_KV_CACHE_BYTES)
        config = replace(config, engine=engine)
    cluster = running_cluster(config, name=name, ray_address=ray_address, progress=progress)
    with cluster as endpoints:
        print(f"Up after {progress.elapsed_s:.1f} s: gRPC on {endpoints.grpc}\n")
        try:
            answers = _ask_all(endpoints)
        except grpc.RpcError as error:
            print(f"\nquire: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        _print_table(answers)
        print("\nStopping …", flush=True)
    print(f"Stopped. All of it took {progress.elapsed_s:.0f} s.")
    return 0


def _ask_all(endpoints: Endpoints) -> list[Answer]:
    system, other = demo_model.SYSTEM_PROMPT, OTHER_SYSTEM_PROMPT
    questions = demo_model.QUESTIONS[: NUM_STREAMED + NUM_TOGETHER]
    with grpc.insecure_channel(endpoints.grpc) as channel:
        answers = []
        for question in questions[:NUM_STREAMED]:
            print(f"> {question}")
            answers.append(_ask(channel, system, question, shown=True))
            print("\n")
        together = questions[NUM_STREAMED:]
        systems = [system if number % 2 else other for number in range(len(together))]
        print(f"And {len(together)} at once, of two assistants:\n")
        with ThreadPoolExecutor(len(together)) as pool:
            asked = pool.map(partial(_ask, channel), systems, together)
            for answer in asked:
                print(f"> {answer.question}\n{answer.text}\n", flush=True)
                answers.append(answer)
    return answers


def _ask(channel: grpc.Channel, system: str, question: str, *, shown: bool = False) -> Answer:
    request = chat_request(
        [("system", system), ("user", question)],
        sampling=pb.SamplingParams(temperature=0, max_tokens=96),
    )
    text, routing, usage = "", pb.Routing(), pb.Usage()
    for chunk in generate(channel, request):
        text += chunk.text
        if shown:
            print(chunk.text, end="", flush=True)
        if chunk.HasField("start"):
            routing = chunk.start.routing
        if chunk.HasField("usage"):
            usage = chunk.usage
    return Answer(question=question, text=text.strip(), routing=routing, usage=usage)


def _print_table(answers: Sequence[Answer]) -> None:
    head = ("question", "group", "why", "prompt", "reused", "TTFT ms", "tokens/s")
    rows = [
        (
            _shortened(answer.question, 34),
            answer.routing.group,
            answer.routing.reason,
            str(answer.usage.num_prompt_tokens),
            str(answer.usage.num_cached_tokens),
            f"{answer.usage.time_to_first_token_s * 1000:.0f}",
            f"{answer.tokens_per_s:.0f}",
        )
        for answer in answers
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - (terminal_width() or inf)
    if excess > 0:  # The column of questions shrinks.
        widths[0] = max(widths[0] - int(excess), len(head[0]))
        rows = [(_shortened(row[0], widths[0]), *row[1:]) for row in rows]
    for row in (head, tuple("-" * width for width in widths), *rows):
        texts = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        print("  ".join([*texts, *numbers]))
    num_prompt = sum(answer.usage.num_prompt_tokens for answer in answers)
    num_reused = sum(answer.usage.num_cached_tokens for answer in answers)
    print(f"\n{num_reused} of {num_prompt} prompt tokens came from the prefix cache.")


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
