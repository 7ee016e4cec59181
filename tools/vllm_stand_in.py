"""A stand-in for the package ``vllm``, with which vLLM's parser tests run on Quire's parser.

``python vllm_stand_in.py FORMATS FILE …``, in the folder of vLLM's source, where ``tools`` and
``tests`` are vLLM's. It prints one line per test with its outcome (for `vllm_parser_tests`).
"""

import ast
import base64
import importlib.abc
import importlib.machinery
import os
import pickle
import re
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.dialects.events import CallArguments, CallBegun, Content, Event
from quire.cluster.dialects.formats import ToolFormat
from quire.cluster.dialects.parser import OutputParser
from quire.cluster.dialects.tools import Tool, check_tools
from quire.worker.request.errors import InvalidRequest

FOLDER = "tests/tool_parsers"


class Bag:
    """Replaces any of vLLM's records: has the given fields, and ``None`` for all others."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"type": "function", "tool_calls": []}.get(name)

    def __eq__(self, other: object) -> bool:
        kind = {"type": "function"}  # Some records state this default, some omit it.
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
    """A tokenizer that splits text into special marks, words and single characters."""

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
    """Splitting an output changed the parser's events."""


class Inside(AttributeError):
    """A test uses an internal attribute of vLLM's parser that Quire's parser lacks."""


class Reader:
    """vLLM's parser interface, implemented by Quire's parser."""

    tools: tuple[Tool, ...] = ()
    """Tools for requests without any: every word of the test file is a tool's name."""
    form: ToolFormat

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
        # Quire's parser ignores calls of unknown tools; the tools with a schema come last.
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
    """Provides the package ``vllm``, with any name that is imported from it."""

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
        """The constant's value in vLLM's file."""
        file = Path(self.__name__.replace(".", "/"))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                return ast.literal_eval(node.value)
        raise AttributeError(name)


def _inside(name: str, *given: Any, **options: Any) -> None:
    raise Inside(name)


class Plugin:
    """The pytest plugin of that process: prints one line per test with its outcome."""

    def __init__(self, formats: Mapping[str, ToolFormat]) -> None:
        self.formats = formats

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        name = name_of(item.path.name)
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
            print(f"\nTOLD\t{name_of(file)}\t{test}\t{outcome}\t{said}")


def name_of(file: str) -> str:
    return file.removeprefix("test_").removesuffix("_tool_parser.py")


def run() -> None:
    """The main function of that process."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # vLLM's plugins would import all of vllm.
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
    formats = pickle.loads(base64.b85decode(sys.argv[1]))
    options = [
        "-q",
        "-s",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    options += ["-c", os.devnull, f"--rootdir={os.getcwd()}", f"--confcutdir={FOLDER}"]
    sys.exit(pytest.main([*options, *sys.argv[2:]], plugins=[Plugin(formats)]))


if __name__ == "__main__":
    run()
