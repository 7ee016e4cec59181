"""What guessing tokens brings and costs: a whole generation with and without, in turns.

    python -m bench.speculation [--shape S|M] [--batch 32] [--rounds N]

The model has random weights, and what it draws is replaced by a given text, so that time and
guesses are those of a model that writes that text:

    rewritten   a file of this project with some names changed, behind the file itself
    json        records by a schema that stands before them
    prose       the design document, behind nothing alike
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.peers.checkpoints import SHAPES, make_checkpoint

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
NUM_TOKENS = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    encode = Tokenizer.load(demo_model.PATH).encode
    texts = {name: [encode(part) for part in parts] for name, parts in _texts().items()}
    print(f"| {arguments.shape} | sequences | tokens/s, without | with | ratio | accepted |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(SHAPES[arguments.shape], Path(folder))
        llms = {
            speculation: LLM(
                path,
                dtype="bfloat16",
                num_threads=arguments.threads,
                speculation=speculation,
                kv_cache_memory_bytes=2**30,
            )
            for speculation in (False, True)
        }
        for count in (1, arguments.batch):
            for name, (prompt, output) in texts.items():
                _compare(llms, name, prompt, output[:NUM_TOKENS], count, arguments.rounds)


def _compare(
    llms: dict[bool, LLM], name: str, prompt: list[int], output: list[int], count: int, rounds: int
) -> None:
    speeds: dict[bool, list[float]] = {False: [], True: []}
    before = llms[True].engine.stats()
    for _ in range(rounds):
        for speculation, llm in llms.items():
            speeds[speculation].append(_speed(llm, prompt, output, count))
    after = llms[True].engine.stats()
    drafted = after.num_drafted_tokens - before.num_drafted_tokens
    accepted = (after.num_accepted_tokens - before.num_accepted_tokens) / max(drafted, 1)
    without, using = (statistics.median(speeds[key]) for key in (False, True))
    ratio = statistics.median(
        one / other for one, other in zip(speeds[True], speeds[False], strict=True)
    )
    print(
        f"| {name} | {count} | {without:.0f} | {using:.0f} | {ratio:.2f} | {accepted:.0%} |",
        flush=True,
    )


def _speed(llm: LLM, prompt: list[int], output: list[int], count: int) -> float:
    """Tokens per second behind the first ones."""
    executor: Any = llm.engine._executor
    given = np.array([*prompt, *output, 0])
    result, submit = executor.result, executor.submit
    steps: list[StepInput] = []
    ends: list[float] = []

    def submitted(step: StepInput) -> None:
        steps.append(step)
        submit(step)

    def scripted() -> StepOutput:
        result()
        step = steps.pop()
        if len(step.samples_S):
            ends.append(time.perf_counter())
        return StepOutput(given[step.sampling.position_S])

    executor.submit, executor.result = submitted, scripted
    try:
        params = SamplingParams(temperature=0, max_tokens=len(output), ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt}] * count
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        executor.submit, executor.result = submit, result
    assert all(each.outputs[0].token_ids == output for each in outputs)
    return count * (len(output) - 1) / (ends[-1] - ends[0])


def _texts() -> dict[str, tuple[str, str]]:
    """Prompts and what follows them."""
    code = (ROOT / "worker/quire/worker/schedule/tables.py").read_text()[:2500]
    schema = {"name": {"type": "string"}, "price": {"type": "number"}, "tags": {"type": "array"}}
    records = [
        {"name": f"item {number * 37 % 101}", "price": number * 7.25 % 50, "tags": ["new", "blue"]}
        for number in range(40)
    ]
    design = (ROOT / "docs/design.md").read_text()
    return {
        "rewritten": (code, code.replace("seq", "request").replace("pool", "blocks")),
        "json": (json.dumps(schema), json.dumps(records)),
        "prose": (design[:2000], design[2000:6000]),
    }


if __name__ == "__main__":
    main()
