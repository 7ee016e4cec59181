"""Compares every model family in every implementation to transformers, as a table.

    python -m bench.families [--only NAME ...]

Small checkpoints of random weights in float32, those of `tests/golden`. Columns: greedy tokens
equal to those of transformers, with the log probabilities of the 20 likeliest within 1e-4 at each;
the greatest of these differences; prompts alone against all in one batch, in chunks; two ranks
against transformers, and against one.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench.report import command
from tests.golden import test_families as described
from tests.golden import test_through_transformers as through
from tests.golden.oracle import MAX_TOKENS, prompts, save
from transformers import AutoModelForCausalLM

import quire.kernels.torch.cpu  # noqa: F401 - asks MKL for strict products before its first one
from quire.kernels.backend import backend_for
from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams
from quire.worker.model.config import read_model_spec
from quire.worker.model.families.registry import FAMILIES
from quire.worker.model.program import attention_options
from quire.worker.rank.executor import InProcessExecutor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError, ConfigError

HEADER = """| case | architecture | implementation | tokens | logits | batch | two ranks |
| --- | --- | --- | --- | ---: | --- | --- |"""
_TOP = 20
_PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=_TOP)
_PLAIN = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Described ones that the golden tests have elsewhere."""

Answer = list[tuple[list[int], list[dict[int, float]]]]
"""For each prompt: its output tokens, and the likeliest tokens' log probabilities at each."""


def cases() -> dict[str, tuple[str, dict[str, Any], int]]:
    """Class of transformers, fields of the configuration and the shortest prompt, by name."""
    found: dict[str, tuple[str, dict[str, Any], int]] = {
        name: (kind, {}, 1) for name, kind in _PLAIN.items()
    }
    found |= {name: (c.name, c.fields, c.shortest) for name, c in described.CASES.items()}
    return found | {name: (*case, 1) for name, case in through.CASES.items() if name not in found}


def main() -> None:
    parser = command("bench.families", __doc__)
    parser.add_argument("--only", nargs="+", default=list(cases()))
    logging.disable(logging.WARNING)  # of each model, what computes it
    print(HEADER)
    for name in parser.parse_args().only:
        kind, fields, shortest = cases()[name]
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder), kind, fields)
            for line in _rows(Path(folder), prompts(shortest=shortest)):
                print(f"| {name} | {line} |", flush=True)


def _rows(path: Path, asked: list[list[int]]) -> Iterator[str]:
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    architecture = type(model).__name__
    expected = [_teacher(model, prompt) for prompt in asked]
    is_described = architecture in FAMILIES
    if is_described and _has_native(path):
        executor = InProcessExecutor(EngineConfig(model=path, num_blocks=128, device="cpu"))
        is_whole = executor.numerics.startswith(f"cpu {native.build_name()}")
        executor.close()
        what = "native, whole pass" if is_whole else "native, operations"
        yield f"{architecture} | {what} | {_checked(path, asked, expected, 'quire')}"
    if is_described:
        with _without_library():
            found = _checked(path, asked, expected, "quire")
        yield f"{architecture} | PyTorch, operations | {found}"
    found = _checked(path, asked, expected, "transformers")
    yield f"{architecture} | transformers | {found}"


def _has_native(path: Path) -> bool:
    """Whether the native library attends as such layers do, or PyTorch computes all there is."""
    spec = read_model_spec(path)
    options = {attention_options(each, spec.max_positions) for each in spec.attentions}
    return backend_for(torch.device("cpu"), options=options).name == "cpu-native"


@contextmanager
def _without_library() -> Iterator[None]:
    with (
        mock.patch.dict(os.environ, {"QUIRE_NATIVE": "0"}),  # for ranks in other processes
        mock.patch.object(native, "library", return_value=None),
    ):
        yield


def _checked(path: Path, asked: list[list[int]], expected: list[Any], impl: Any) -> str:
    """Four columns."""
    try:
        (together,) = _answers(path, [asked], impl, max_num_batched_tokens=40)
    except (CheckpointError, ConfigError):
        return "refused | | |"
    alone = [answer[0] for answer in _answers(path, [[prompt] for prompt in asked], impl)]
    try:
        (ranks,) = _answers(path, [asked], impl, tensor_parallel_size=2)
        on_two = _equal(ranks, expected) + (", same bits" if ranks == together else "")
    except ConfigError:
        on_two = "refused"
    same = "same bits" if alone == together else "OTHER BITS"
    error = max(map(_error, together, expected))
    return f"{_equal(together, expected)} | {error:.0e} | {same} | {on_two}"


def _equal(found: Answer, expected: list[Any]) -> str:
    is_near = max(map(_error, found, expected)) <= 1e-4
    is_equal = all(each[0] == wanted[0] for each, wanted in zip(found, expected, strict=True))
    return "equal" if is_equal and is_near else "NOT EQUAL"


def _answers(path: Path, batches: list[list[list[int]]], impl: Any, **more: Any) -> list[Answer]:
    """To each batch of prompts, one batch after the other."""
    settings: dict[str, Any] = {"num_blocks": 128, "max_num_seqs": 8, "num_threads": 1} | more
    settings |= {"model_impl": impl, "device": "cpu", "enable_prefix_caching": False}
    with LLM(path, **settings) as llm:
        return [
            [
                _found(output.outputs[0])
                for output in llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in batch], _PARAMS, use_tqdm=False
                )
            ]
            for batch in batches
        ]


def _found(completion: Any) -> tuple[list[int], list[dict[int, float]]]:
    steps = [
        {token: value.logprob for token, value in step.items()} for step in completion.logprobs
    ]
    return list(completion.token_ids), steps


@torch.inference_mode()
def _teacher(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens, and the log probabilities of the whole vocabulary at each."""
    token_ids, rows = list(prompt), []
    for _ in range(MAX_TOKENS):
        logits_V = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        token_ids.append(int(logits_V.argmax()))
        rows.append(logits_V.log_softmax(-1))
    return token_ids[len(prompt) :], torch.stack(rows)


def _error(found: tuple[list[int], list[dict[int, float]]], expected: Any) -> float:
    """The greatest difference of a log probability. Equal tokens before it are the teacher's."""
    _, rows = expected
    return max(
        abs(value - float(row[token]))
        for step, row in zip(found[1], rows, strict=True)
        for token, value in step.items()
    )


if __name__ == "__main__":
    main()
