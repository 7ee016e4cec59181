"""Runs vLLM's tests of tool call parsers on Quire's: ``python -m tools.vllm_parser_tests``.

The tests are fetched (`tools.strangers`) and run unchanged by pytest in another process, in which
the package ``vllm`` is a stand-in that wraps Quire's parser. Each output that a test parses whole
is also parsed split in two at every place, and by character, with the same events expected.
For each test file the table shows how many tests pass, differ for a known reason, differ without
one, or test internals of vLLM's parser.
"""

import argparse
import base64
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers
from tools.strangers import sdist
from tools.templates import carried

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.formats import TOOL_FORMATS, ToolFormat
from quire.worker.text.tokenizer import Tokenizer

_FOLDER = "tests/tool_parsers"
_FORMATS = {each.name: each for each in TOOL_FORMATS}
FILES = {
    "hermes": "hermes",
    "granite4": "hermes",
    "granite": "granite",
    "qwen3coder": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm4_moe": "glm45",
    "glm47_moe": "glm45",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "llama3_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "pythonic": "pythonic",
    "functiongemma": "functiongemma",
    "gemma4": "gemma4",
    "poolside_v1": "glm45",
    "apertus": "Apertus-8B-Instruct",
    "deepseekv32": "deepseek-ai-DeepSeek-V3.2",
    "deepseekv4": "deepseek-ai-DeepSeek-V4",
    "granite_20b_fc": "tool_chat_template_granite_20b_fc",
    "hunyuan_a13b": "tool_chat_template_hunyuan_a13b",
    "internlm2": "tool_chat_template_internlm2_tool",
    "lfm2": "LFM2.5-8B-A1B",
    "minicpm5xml": "openbmb-MiniCPM5-1B",
    "minimax_m2": "MiniMax-M2",
    "xlam": "tool_chat_template_xlam_llama",
}
"""Quire's format, or a chat template from which it is detected, for each of vLLM's test files
``test_…_tool_parser.py``, by the middle of its name."""
KNOWN: Mapping[str, Mapping[str, str]] = {
    "space before a call is left out": {
        "granite4": "complex",
        "kimi_k2": r"::test_extract_tool_calls\[",
        "apertus": "massive_chunk",
        "deepseekv32": "content_before|delimiter_preserved",
        "deepseekv4": "test_extract_tool_calls$",
        "hunyuan_a13b": "model_output3",
        "minimax_m2": "content_before",
    },
    "space is told once it is known not to be before a call": {"hermes": "just_forward_text"},
    "text between and behind calls is kept": {
        "deepseekv31": "with_multiple_tools",
        "kimi_k2": "noise_between_markers|content_after_tool_section",
        "step3p5": "non_streaming_mixed_content",
        "hunyuan_a13b": "Thank you",
        "lfm2": "content_after|echoed",
        "minicpm5xml": "surrounding_text|interleaved_text",
    },
    "a call whose arguments are no JSON ends as cut, as a stream must have it": {
        "hermes": "invalid_json",
        "llama3_json": "invalid_json",
        "gemma4": "incomplete_tool_call",
        "lfm2": "nested_",
        "minicpm5xml": "missing_function_end",
    },
    "a call without marks is one where it is all that the model says": {
        "llama3_json": "calls_simple|surrounding_text",
    },
    "a call is of a tool": {"gemma4": "malformed|three_mixed"},
    "a call of another format is content": {
        "xlam": "think_tag|code_block|tool_calls_tag|xml_tags",
        "deepseekv4": "wrapper_is_not_recognized",
    },
    "arguments are not guessed: wrappers, aliases, other tags, numbers that are none": {
        "deepseekv32": "wrapper_repaired",
        "deepseekv4": "arguments_wrapper",
        "lfm2": "set_arg|leading_zero",
        "minicpm5xml": "cdata|wrapped|alias|space_marker|collapsed|sentencepiece",
    },
    "arguments that the schema refuses are told as they are": {
        "minicpm5xml": "invalid|extra_arg|zero_arg|unknown_tool",
    },
    "formats that are read back have no call without the mark before it": {
        "deepseekv4": "missing_tool_calls_wrapper",
    },
    "5.0 stays 5.0": {"deepseekv32": "number_param"},
    "where no schema says more, what is JSON is JSON": {
        "minimax_m2": "multiple_params|separate_chunks"
    },
    "a stand-in's chunk has all that a token says, an answer's one event": {
        "step3p5": "streaming_incremental",
        "xlam": r"incremental\[parallel",
    },
    "about structural tags, or a parser's state": {
        "qwen3coder": "structural_tag",
        "deepseekv4": "structural_tag",
        "xlam": "list_structure",
    },
}
"""Known reasons why tests differ: for each, regular expressions of test names by file."""


def formats_here() -> dict[str, ToolFormat]:
    """Quire's format for each of vLLM's test files."""
    sources = dict(carried())
    formats = {}
    for name, known in FILES.items():
        form = _FORMATS.get(known)
        if form is None:
            backend = tokenizers.Tokenizer(tokenizers.models.BPE())
            form = choose_dialect(Tokenizer(backend, chat_template=sources[known])).calls
        assert form is not None, known
        formats[name] = form
    return formats


def results(folder: Path) -> Iterator[list[str]]:
    """Yields file, test, outcome and message of each test."""
    files = [f"{_FOLDER}/test_{name}_tool_parser.py" for name in FILES]
    # In that process, ``tools`` is vLLM's package.
    formats = base64.b85encode(pickle.dumps(formats_here())).decode()
    command = [sys.executable, str(Path(__file__).with_name("vllm_stand_in.py")), formats, *files]
    path = os.pathsep.join([str(folder), *sys.path])
    told = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    lines = [line.split("\t")[1:] for line in told.stdout.splitlines() if line[:5] == "TOLD\t"]
    if not lines:
        raise SystemExit(told.stdout[-3000:] + told.stderr[-3000:])
    yield from lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs vLLM's tests of parsers on ours.")
    parser.add_argument("--verbose", action="store_true", help="tell of each test that differs")
    arguments = parser.parse_args()
    counts: dict[str, Counter[str]] = {name: Counter() for name in FILES}
    reasons: Counter[str] = Counter()
    for name, test, outcome, said in results(sdist("vllm")):
        verdict = outcome
        if outcome == "differs":
            reason = _reason(name, test)
            reasons[reason] += 1
            verdict = "known" if reason else "unexplained"
            if arguments.verbose or not reason:
                print(f"{name}: {test}: {said}")
        counts[name][verdict] += 1
    columns = ("equal", "known", "unexplained", "inside")
    print(f"{'file':16} {'format':14}", *(f"{each:>12}" for each in columns))
    for name, count in counts.items():
        print(f"{name:16} {FILES[name]:14}", *(f"{count[each]:12}" for each in columns))
    total = sum(counts.values(), Counter())
    print(f"{'all':31}", *(f"{total[each]:12}" for each in columns))
    print("\nKnown differences here:")
    for reason, number in reasons.most_common():
        print(f"{number:4} {reason or 'unexplained'}")


def _reason(name: str, test: str) -> str:
    for reason, tests in KNOWN.items():
        if name in tests and re.search(tests[name], test):
            return reason
    return ""


if __name__ == "__main__":
    main()
