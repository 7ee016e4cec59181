"""The dialect of a model: how it writes calls and reasoning, as an operator says, or else as its
response template says or its chat template shows."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from quire.cluster.dialects.formats import (
    TOOL_FORMATS,
    ToolFormat,
    check_parsers,
    markers_of,
)
from quire.cluster.dialects.response_template import calls_from
from quire.cluster.dialects.tools import ToolUse
from quire.worker.api.errors import InvalidRequest, UnreadableTemplate
from quire.worker.api.hashing import TokenIds
from quire.worker.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_from,
    sign_in,
)
from quire.worker.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

F = TypeVar("F", ToolFormat, ReasoningFormat)


@dataclass(frozen=True, kw_only=True)
class Dialect:
    calls: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    parses_calls: bool = True
    """Calls are to be parsed; else they stay text because an operator wants it so."""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    """Those of the tokenizer's special tokens that are markers here, by id."""

    def check(self, use: ToolUse) -> None:
        """Raises InvalidRequest: it is not known how the model calls tools, or calls cannot be
        had in the way the request asks for them."""
        if not use.tools:
            return
        if self.calls is None and (self.parses_calls or use.has_form):
            raise InvalidRequest(
                "tools are not supported: the model's chat template shows none of the known "
                "formats of calls, serve it with --tool-call-parser"
            )

    def shown_token_ids(self, *, with_calls: bool) -> frozenset[int]:
        """Special tokens that an answer's text must show to its parser."""
        texts = [*markers_of(self.calls if with_calls else None), *markers_of(self.reasoning)]
        return frozenset(
            token_id
            for token_id, token in self.special_tokens.items()
            if any(token in text for text in texts)
        )

    def reasons(self, tokenizer: Tokenizer, prompt_token_ids: TokenIds) -> bool | None:
        """Whether the prompt ends where reasoning has just begun, or has ended; ``None`` where it
        leaves that to the model."""
        return self.reasoning.begun(tokenizer, prompt_token_ids) if self.reasoning else False


def choose_dialect(
    tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> Dialect:
    """The formats of these names; "auto" is the one that the response template says, or else the
    one that the chat template shows, if any. The log tells which, and why. Raises ConfigError:
    there is no such name."""
    check_parsers(tool_call_parser, reasoning_parser)
    calls = _choose("calls of tools", tool_call_parser, TOOL_FORMATS, calls_from, tokenizer)
    reasoning = _choose("reasoning", reasoning_parser, REASONING_FORMATS, reasoning_from, tokenizer)
    texts = [*markers_of(calls), *markers_of(reasoning)]
    return Dialect(
        calls=calls,
        reasoning=reasoning,
        parses_calls=tool_call_parser != "none",
        special_tokens={
            token_id: token
            for token_id, token in tokenizer.special_tokens().items()
            if any(token in text for text in texts)
        },
    )


def _choose(
    what: str,
    name: str,
    formats: tuple[F, ...],
    said_by: Callable[[object], F],
    tokenizer: Tokenizer,
) -> F | None:
    if name == "none":
        _log.info("%s: left as text, as configured", what)
        return None
    if name != "auto":
        _log.info("%s: read as %s, as configured", what, name)
        return next(each for each in formats if each.name == name)
    if tokenizer.response_template is not None:
        try:
            said = said_by(tokenizer.response_template)
        except UnreadableTemplate as error:
            _log.warning("%s: the response template is left aside: %s", what, error)
        else:
            _log.info("%s: read as %s: the response template says so", what, said.name)
            return said
    source = tokenizer.template.text if tokenizer.template is not None else ""
    for each in formats:
        texts = sign_in(source, each.signs)
        if texts is not None:
            shown = " and ".join(map(repr, texts))
            _log.info("%s: read as %s: the chat template has %s", what, each.name, shown)
            return each
    _log.info("%s: none are read: the chat template shows no known format", what)
    return None
