"""The benefit and cost of speculative decoding: generation with and without it, alternating.

    python -m bench.speculation [--shape S|M] [--batch 32] [--rounds N]

The model has random weights, and the tokens that it samples are replaced by a given text, so that
time and draft tokens are those of a model that writes that text:

    rewritten    a file of this project with some names changed; the prompt is the file
    edited       the file with 6 % of its tokens replaced by random ones; the prompt is the file
    json         records by a schema that is in the prompt
    constrained  records by a schema that constrains them; nothing similar in the prompt
    again        records; nothing similar in the prompt, but in another request
    prose        the design document; nothing similar in the prompt
"""

import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.report import command

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.request.structured import json_constraint
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
NUM_TOKENS = 400
_NUMBERS = itertools.count()


def main() -> None:
    parser = command("bench.speculation", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    cases = _cases(Tokenizer.load(demo_model.PATH))
    names = [case.name for case in cases]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quantization", choices=("int8", "w4"))
    arguments = parser.parse_args()
    print(f"| {arguments.shape} | sequences | tokens/s, without | with | ratio | accepted |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(SHAPES[arguments.shape], Path(folder))
        shutil.copy(demo_model.PATH / "tokenizer.json", path)  # Constraints use its tokens.
        llms = {
            speculation: LLM(
                path,
                dtype="bfloat16",
                quantization=arguments.quantization,
                num_threads=arguments.threads,
                speculation=speculation,
                kv_cache_memory_bytes=2**30,
            )
            for speculation in (False, True)
        }
        for count in (1, arguments.batch):
            for case in cases:
                if case.name not in arguments.cases:
                    continue
                _compare(llms, case, count, arguments.rounds)


class _Case(NamedTuple):
    name: str
    prompt: list[int]
    output: list[int]
    form: dict[str, Any] | None
    """The schema that the output must have."""
    before: list[int]
    """The output of an earlier request."""


def _compare(llms: dict[bool, LLM], case: _Case, count: int, rounds: int) -> None:
    speeds: dict[bool, list[float]] = {False: [], True: []}
    before = llms[True].engine.stats()
    for _ in range(rounds):
        for speculation, llm in llms.items():
            speeds[speculation].append(_speed(llm, case, count))
    after = llms[True].engine.stats()
    drafted = after.num_drafted_tokens - before.num_drafted_tokens
    accepted = (after.num_accepted_tokens - before.num_accepted_tokens) / max(drafted, 1)
    without, using = (statistics.median(speeds[key]) for key in (False, True))
    ratio = statistics.median(
        one / other for one, other in zip(speeds[True], speeds[False], strict=True)
    )
    print(
        f"| {case.name} | {count} | {without:.0f} | {using:.0f} | {ratio:.2f} | {accepted:.0%} |",
        flush=True,
    )


def _speed(llm: LLM, case: _Case, count: int) -> float:
    """Tokens per second after the first ones."""
    salt = str(next(_NUMBERS))  # What another round has written is not known.
    if case.before:
        _run(llm, case.prompt, case.before, None, 1, salt)
    ends = _run(llm, case.prompt, case.output, case.form, count, salt)
    return count * (len(case.output) - 1) / (ends[-1] - ends[0])


def _run(
    llm: LLM,
    prompt: list[int],
    output: list[int],
    form: dict[str, Any] | None,
    count: int,
    salt: str,
) -> list[float]:
    """Has the model write ``output``; when each step with a sample ended."""
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
        params = SamplingParams(
            temperature=0,
            max_tokens=len(output),
            ignore_eos=True,
            structured_outputs=json_constraint(form) if form else None,
        )
        prompts: list[Any] = [{"prompt_token_ids": prompt, "cache_salt": salt}] * count
        outputs = llm.generate(prompts, params, use_tqdm=False)
    finally:
        executor.submit, executor.result = submit, result
    assert all(each.outputs[0].token_ids == output for each in outputs)
    return ends


def _cases(tokenizer: Tokenizer) -> list[_Case]:
    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    cases = [
        _Case(name, encode(prompt), encode(output)[:NUM_TOKENS], form, encode(before)[:NUM_TOKENS])
        for name, (prompt, output, form, before) in _texts().items()
    ]
    file = cases[0].prompt
    return [
        *cases,
        _Case("edited", file, _edited(file[:NUM_TOKENS], tokenizer.vocab_size), None, []),
    ]


def _edited(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """6 % of them are other tokens."""
    drawn = random.Random(0)
    return [drawn.randrange(vocab_size) if drawn.random() < 0.06 else each for each in token_ids]


def _texts() -> dict[str, tuple[str, str, dict[str, Any] | None, str]]:
    """Prompts, what follows them, its schema and what another request's output was before."""
    code = (ROOT / "worker/quire/worker/engine/tables.py").read_text()[:2500]
    schema = {"name": {"type": "string"}, "price": {"type": "number"}, "tags": {"type": "array"}}
    records, others = (
        [
            {
                "name": f"item {number * factor % 101}",
                "price": number * 7.25 % 50,
                "tags": ["new", "blue"],
            }
            for number in range(40)
        ]
        for factor in (37, 53)
    )
    form = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": schema,
            "required": [*schema],
            "additionalProperties": False,
        },
    }
    design = (ROOT / "docs/design.md").read_text()
    return {
        "rewritten": (code, code.replace("seq", "request").replace("pool", "blocks"), None, ""),
        "json": (json.dumps(schema), json.dumps(records), None, ""),
        "constrained": (design[:500], json.dumps(records), form, ""),
        "again": (design[:500], json.dumps(records), None, json.dumps(others)),
        "prose": (design[:2000], design[2000:6000], None, ""),
    }


if __name__ == "__main__":
    main()
