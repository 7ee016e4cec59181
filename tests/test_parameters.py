"""Bounds the number of files that name each sampling parameter: a new one would touch as many."""

import re
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

from quire.worker.request.sampling_params import SamplingParams

ROOT = Path(__file__).resolve().parents[1]
NAMES = [field.name for field in fields(SamplingParams)]
MOST_FILES = 5
KNOWN_WIDELY = {
    # Numbers of each sample, which kernels take as arrays; seeds also occur elsewhere.
    **dict.fromkeys(["temperature", "top_p", "top_k", "min_p", "seed"], "in kernels"),
    **dict.fromkeys(["n", "stop"], "a word of its own"),
    "max_tokens": "admission, routing and the endpoints count by it",
    **dict.fromkeys(["logprobs", "prompt_logprobs"], "a result too"),
    "ignore_eos": "the load of `quire bench serve` asks other servers for it too",
    "structured_outputs": "messages of the grammar's compiler begin with it",
    "skip_special_tokens": "an argument of all that decodes",
    "truncate_prompt_tokens": "an argument of all that embeds",
    "logprob_token_ids": "a reranker's score is made of two tokens'",
}
"""Parameters that more files may name, with the reason."""
EDGES = "/edge/|/features/(anthropic|responses|vllm_grpc|embeddings/api)"
"""Files of what clients talk to."""


def files_by_name() -> dict[str, set[str]]:
    """For each parameter the source files that name it, also as an array with a shape suffix.
    protoc's stubs do not count."""
    longest_first = sorted(NAMES, key=len, reverse=True)
    pattern = re.compile(rf"\b({'|'.join(longest_first)})(?:_[A-Z]+)?\b")
    found = defaultdict(set)
    for root in ("worker", "cluster", "kernels", "router", "proto"):
        for path in sorted((ROOT / root).rglob("*")):
            if path.suffix in {".py", ".proto", ".cpp", ".h"} and "_pb2" not in path.name:
                for name in pattern.findall(path.read_text()):
                    found[name].add(str(path.relative_to(ROOT)))
    return found


FILES = files_by_name()


@pytest.mark.parametrize("name", NAMES)
def test_few_files_name_a_parameter_unless_there_is_a_reason(name: str) -> None:
    files = FILES[name]
    assert {
        "worker/quire/worker/request/sampling_params.py",
        "proto/quire/v1/inference.proto",
    } <= files
    assert (len(files) > MOST_FILES) == (name in KNOWN_WIDELY), sorted(files)


def test_edges_name_no_other_parameter_than_those_that_their_answers_cannot_show() -> None:
    at_edges = {
        name: {file for file in FILES[name] if re.search(EDGES, file)}
        for name in NAMES
        if name not in KNOWN_WIDELY or name == "logprob_token_ids"
    }
    folder = "cluster/quire/cluster/features"
    assert {name: files for name, files in at_edges.items() if files} == {
        "logprob_token_ids": {f"{folder}/anthropic/schema.py", f"{folder}/responses/schema.py"}
    }
