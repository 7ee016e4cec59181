"""Models of every kind on groups of two ranks: streams stay exact when a group is killed."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.golden.oracle import save
from tests.served.conftest import CONFIG, marked_processes
from tests.served.paced_group import ReplicaGroup

from quire import demo_model
from quire.cluster.deploy.app import running_app
from quire.cluster.deploy.local import ray_session
from quire.cluster.tools.generate import generate
from quire.llm import LLM, SamplingParams
from quire.v1 import inference_pb2 as pb

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_TOKENS = 24
HALVES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("Llama", {}, {}),
    "windowed": ("Gemma3", HALVES | {"head_dim": 16}, {}),
    "experts": ("Qwen3Moe", EXPERTS, {}),
    "w4": ("Llama", {}, {"quantization": "w4"}),
    # Refused on two ranks, so these groups have one.
    "through transformers": ("GPT2", {"n_inner": 96}, {"tensor_parallel_size": 1}),
}
"""By name: class of transformers, fields of the configuration, and engine settings."""
PROMPTS = [[first, *range(3, 3 + length)] for first, length in enumerate((5, 33, 40, 70), 100)]


@pytest.fixture(scope="module")
def ray(pace_file: Path) -> Iterator[None]:
    with marked_processes(), ray_session():
        yield


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_exact_through_a_killed_group(
    kind: str, tmp_path: Path, pace: Callable[[float], None]
) -> None:
    name, fields, settings = KINDS[kind]
    settings = {"tensor_parallel_size": 2} | settings
    save(tmp_path, name, fields | {"vocab_size": 4096})
    for file in demo_model.PATH.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    engine = replace(CONFIG.engine, model=tmp_path, **settings)
    with LLM(tmp_path, num_blocks=64, num_threads=1, **settings) as llm:
        expected = [tokens_of(llm, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    config = replace(CONFIG, engine=engine, max_queue_wait_s=1000)
    with (
        running_app(config, group=ReplicaGroup) as endpoints,
        grpc.insecure_channel(endpoints.grpc) as channel,
    ):
        pace(0.3)  # No stream ends before a group is killed.
        streams = [generate(channel, asked(seed, each)) for seed, each in enumerate(PROMPTS)]
        begun = [next(stream) for stream in streams]
        assert len({chunk.start.routing.group for chunk in begun}) == 2
        os.kill(pids_of_groups()[0], signal.SIGKILL)
        pace(0)
        rest = [list(stream) for stream in streams]
    found = [
        [token for chunk in (first, *chunks) for token in chunk.token_ids]
        for first, chunks in zip(begun, rest, strict=True)
    ]
    assert found == expected
    assert all(chunks[-1].usage.num_output_tokens == NUM_TOKENS for chunks in rest)


def asked(seed: int, prompt: list[int]) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.8, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)


def tokens_of(llm: LLM, prompt: list[int], seed: int) -> list[int]:
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def pids_of_groups() -> list[int]:
    """Process ids of the replica groups of this test's cluster."""
    mark = f"QUIRE_TEST_CLUSTER={os.environ['QUIRE_TEST_CLUSTER']}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = mark in (process / "environ").read_bytes().split(b"\0")
            if is_marked and b"ReplicaGroup" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # It has just ended, or is another user's.
    return found
