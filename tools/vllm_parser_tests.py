"""Runs vLLM's tests of its parsers of calls on ours: ``python -m tools.vllm_parser_tests``.

They are fetched (`tools.strangers`) and run as they are, by pytest in a process of its own, in
which the package ``vllm`` is a stand-in made of the parser here. Each output that a test gives to
a parser whole is also read in every cut in two and a character at a time, to the same events. The
table tells of each of their files how many tests hold, differ for a reason that is known here, or
differ without; and how many are about what is inside their own parser.
"""

import argparse
import ast
import base64
import importlib.abc
import importlib.machinery
import os
import pickle
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from quire.cluster.dialects.dialect import choose_dialect
from quire.cluster.dialects.formats import TOOL_FORMATS, ToolFormat
from quire.cluster.dialects.parser import (
    CallArguments,
    CallBegun,
    Content,
    Event,
    OutputParser,
)
from quire.cluster.dialects.tools import Tool, check_tools
from quire.worker.api.errors import InvalidRequest
from quire.worker.text.tokenizer import Tokenizer

_INSIDE = "--inside"
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
"""Of their files, by what is between ``test_`` and ``_tool_parser.py``: the format here, or the
chat template from which it is read back."""
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
"""Why a test does not hold: of its file, by a regular expression for its name."""


class Bag:
    """Any of their records: what it is given, ``None`` for all else."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"type": "function", "tool_calls": []}.get(name)

    def __eq__(self, other: object) -> bool:
        kind = {"type": "function"}  # Some say so, some leave it to be so.
        return isinstance(other, Bag) and kind | self.model_dump() == kind | other.model_dump()

    @classmethod
    def model_validate(cls, fields: Any) -> "Bag":
        return cls(**fields)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return repr(self.model_dump())

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {
            name: _plain(value) for name, value in vars(self).items() if value not in (None, [])
        }


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.model_dump() if hasattr(value, "model_dump") else value


class Words:
    """A tokenizer of marks, words and single characters."""

    _PIECE = re.compile(r"<[^<>\s]{1,40}>|\[[A-Z_]+\]|\w+|\s|.", re.DOTALL)

    def __init__(self) -> None:
        self.vocab: dict[str, int] = {}

    def tokenize(self, text: str) -> list[str]:
        pieces = self._PIECE.findall(text)
        for piece in pieces:
            if piece not in self.vocab:
                self.vocab[piece] = max(self.vocab.values(), default=0) + 1
        return pieces

    def encode(self, text: str, **options: Any) -> list[int]:
        return [self.vocab[piece] for piece in self.tokenize(text)]

    def decode(self, token_ids: int | Sequence[int], **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        pieces = {token_id: piece for piece, token_id in self.vocab.items()}
        return "".join(pieces[token_id] for token_id in ids)

    def add_tokens(self, *given: Any, **options: Any) -> None:
        pass

    add_special_tokens = add_tokens

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return []


class Differs(Exception):
    """A cut of an output made a difference."""


class Inside(AttributeError):
    """A test is about what is inside their parser, and nothing here has."""


class Reader:
    """Their parser's interface, on ours."""

    tools: tuple[Tool, ...] = ()
    """Of requests that have none: any word of the file is one's name."""
    form = _FORMATS["hermes"]

    def __init__(self, tokenizer: Any = None, tools: Any = None, *rest: Any, **options: Any):
        self.model_tokenizer = tokenizer or Words()
        self._given = tools
        self._parser: OutputParser | None = None

    @property
    def vocab(self) -> Any:
        return self.model_tokenizer.get_vocab()

    def __getattr__(self, name: str) -> Any:
        raise Inside(name)

    def extract_tool_calls(self, model_output: str, request: Any = None) -> Bag:
        whole = self._read([model_output], request)
        cuts = [
            [*model_output],
            *([model_output[:at], model_output[at:]] for at in range(1, len(model_output))),
        ]
        for pieces in cuts:
            if self._read(pieces, request) != whole:
                raise Differs(pieces)
        content, calls = "", []
        for event in whole:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, CallBegun):
                function = Bag(name=event.name, arguments="")
                call_id = event.given_id or _call_id(event)
                calls.append(Bag(id=call_id, type="function", function=function))
            elif isinstance(event, CallArguments):
                calls[event.index].function.arguments += event.text
        return Bag(content=content or None, tool_calls=calls, tools_called=bool(calls))

    def extract_tool_calls_streaming(
        self,
        previous_text: str = "",
        current_text: str = "",
        delta_text: str = "",
        previous_token_ids: Any = (),
        current_token_ids: Any = (),
        delta_token_ids: Any = (),
        request: Any = None,
    ) -> Bag | None:
        if self._parser is None or (not previous_text and current_text == delta_text):
            self._parser = self._new(request)
        return _delta(self._parser.feed(delta_text))

    def finish(self) -> Bag | None:
        return _delta(self._parser.finish()) if self._parser is not None else None

    def _read(self, pieces: Sequence[str], request: Any) -> list[Event]:
        parser = self._new(request)
        events = [event for piece in pieces for event in parser.feed(piece)]
        joined: list[Event] = []
        for event in (*events, *parser.finish()):
            last = joined[-1] if joined else None
            if isinstance(event, Content) and isinstance(last, Content):
                joined[-1] = Content(last.text + event.text)
            elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
                joined[-1] = CallArguments(last.index, last.text + event.text)
            else:
                joined.append(event)
        return joined

    def _new(self, request: Any) -> OutputParser:
        given = getattr(request, "tools", None) or self._given
        described: tuple[Tool, ...] = ()
        if isinstance(given, list):
            with suppress(InvalidRequest):
                described = check_tools([_tool(each) for each in given])
        # A name that is no tool's makes no call here: the tools that have a schema come last.
        return OutputParser(calls=self.form, tools=[*self.tools, *described])


def _tool(given: Any) -> Any:
    plain = _plain(given)
    function = plain.get("function") or {k: v for k, v in plain.items() if k != "type"}
    return {"type": "function", "function": {**function, "strict": None}}


def _delta(events: Sequence[Event]) -> Bag | None:
    content, calls = "", {}
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegun):
            function = Bag(name=event.name, arguments="")
            call_id = event.given_id or _call_id(event)
            calls[event.index] = Bag(
                index=event.index, id=call_id, type="function", function=function
            )
        elif isinstance(event, CallArguments):
            if event.index not in calls:
                calls[event.index] = Bag(index=event.index, function=Bag(arguments=""), type=None)
            calls[event.index].function.arguments += event.text
    if not content and not calls:
        return None
    return Bag(content=content or None, tool_calls=[*calls.values()])


def _call_id(event: CallBegun) -> str:
    return f"call_{event.index:024}"


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes the package ``vllm``, whatever is imported of it."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] not in ("vllm", "xgrammar"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "get_tokenizer":
            return lambda *given, **options: Words()
        if name.endswith("Manager"):
            return Bag(get_tool_parser=lambda parser: Reader)
        if name.endswith("Parser"):
            return Reader
        if name == "detokenize_incrementally":
            return lambda tokenizer, all_input_ids, **options: (
                [],
                tokenizer.decode(all_input_ids[-1:]),
                0,
                0,
            )
        made: Any = type(name, (Bag,), {})
        if name.isupper():
            made = self._constant(name)
        elif name[0].islower() or name[0] == "_":
            made = partial(_inside, name)
        setattr(self, name, made)
        return made

    def _constant(self, name: str) -> Any:
        """As their file has it."""
        file = Path(self.__name__.replace(".", "/"))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
        raise AttributeError(name)


def _inside(name: str, *given: Any, **options: Any) -> None:
    raise Inside(name)


class Plugin:
    """What pytest does in the other process. Tells each test and how it ended, a line each."""

    def __init__(self, formats: Mapping[str, ToolFormat]) -> None:
        self.formats = formats

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = _name(item.path.name)
        Reader.form = self.formats[name]
        words = sorted(set(re.findall(r"[A-Za-z_][\w.-]*", item.path.read_text())))
        Reader.tools = tuple(
            Tool(name=word, spec={"type": "function", "function": {"name": word}}) for word in words
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and not report.passed):
            path, _, test = report.nodeid.partition("::")
            file = path.rpartition("/")[2]
            reason = str(report.longrepr or "").strip().splitlines()[-1:] or [""]
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
            said = (crash.splitlines() or reason)[0]
            outcome = {"passed": "equal", "skipped": "skipped"}.get(report.outcome, "differs")
            if "XPASS" in said:
                outcome = "equal"
            elif (
                "Inside" in said
                or "adjust_request" in test
                or "does not have the attribute" in said
            ):
                outcome = "inside"
            print(f"\nTOLD\t{_name(file)}\t{test}\t{outcome}\t{said}")


def _name(file: str) -> str:
    return file.removeprefix("test_").removesuffix("_tool_parser.py")


def formats_here() -> dict[str, ToolFormat]:
    """The format here of each of their files."""
    from tools.templates import carried

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
    """File, test, outcome and what was said of it."""
    files = [f"{_FOLDER}/test_{name}_tool_parser.py" for name in FILES]
    # There, ``tools`` is theirs.
    formats = base64.b85encode(pickle.dumps(formats_here())).decode()
    command = [sys.executable, __file__, _INSIDE, formats, *files]
    path = os.pathsep.join([str(folder), *sys.path])
    told = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    lines = [line.split("\t")[1:] for line in told.stdout.splitlines() if line[:5] == "TOLD\t"]
    if not lines:
        raise SystemExit(told.stdout[-3000:] + told.stderr[-3000:])
    yield from lines


def run() -> None:
    """In the other process."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # Theirs would import all of it.
    sys.meta_path.insert(0, StandIn())
    utils: Any = importlib.import_module("tests.tool_parsers.utils")
    transformers: Any = importlib.import_module("transformers")
    transformers.AutoTokenizer.from_pretrained = lambda *given, **options: Words()
    stream = utils.run_tool_extraction_streaming

    def to_the_end(parser: Any, *given: Any, **options: Any) -> Any:
        told = stream(parser, *given, **options)
        if (last := parser.finish()) is not None:
            told.append_delta(last)
        return told

    utils.run_tool_extraction_streaming = to_the_end
    formats = pickle.loads(base64.b85decode(sys.argv[2]))
    options = [
        "-q",
        "-s",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    options += ["-c", os.devnull, f"--rootdir={os.getcwd()}", f"--confcutdir={_FOLDER}"]
    sys.exit(pytest.main([*options, *sys.argv[3:]], plugins=[Plugin(formats)]))


def main() -> None:
    if sys.argv[1:2] == [_INSIDE]:
        run()
    from tools.strangers import sdist

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
