"""The dialect of a model: how it writes calls and reasoning, as an operator says, or else as its
response template says or its chat template shows."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from quire.cluster.dialects.formats import (
    TOOL_FORMATS,
    ToolFormat,
    check_parsers,
    markers_of,
)
from quire.cluster.dialects.read_back import Shown, read_back, reads, shown_by
from quire.cluster.dialects.response_template import calls_from
from quire.cluster.dialects.tools import ToolUse
from quire.worker.api.errors import InvalidRequest, UnreadableTemplate
from quire.worker.api.hashing import TokenIds
from quire.worker.text.chat_template import ChatTemplate
from quire.worker.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_from,
    sign_in,
)
from quire.worker.text.template_process import TemplateProcess
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
                "formats of calls, serve it with --tool-call-parser",
                param="tools",
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

    def goes_on(self, tokenizer: Tokenizer, prompt_token_ids: TokenIds) -> bool:
        """Whether the prompt, which ends within reasoning, has a text of it."""
        return self.reasoning is not None and self.reasoning.goes_on(tokenizer, prompt_token_ids)


def choose_dialect(
    tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> Dialect:
    """The formats of these names; "auto" is the one that the response template says, or else the
    one that the chat template shows, if any. The log tells which, and why. Raises ConfigError:
    there is no such name."""
    check_parsers(tool_call_parser, reasoning_parser)
    may_fit = tool_call_parser == "auto" and tokenizer.response_template is None
    formats = _fitting(tokenizer) if may_fit else TOOL_FORMATS
    calls = _choose("calls of tools", tool_call_parser, formats, calls_from, tokenizer)
    reasoning = _choose("reasoning", reasoning_parser, REASONING_FORMATS, reasoning_from, tokenizer)
    texts = [*markers_of(calls), *markers_of(reasoning)]
    return Dialect(
        calls=calls,
        reasoning=reasoning,
        parses_calls=tool_call_parser != "none",
        special_tokens={
            token_id: token
            for token_id, token in tokenizer.special_tokens.items()
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


def _fitting(tokenizer: Tokenizer) -> tuple[ToolFormat, ...]:
    """The formats that read what the chat template writes where the model calls: of the table, or
    else the template's own. All of the table where it shows no calls."""
    template = tokenizer.template
    shown = _shown(template) if template is not None else None
    if template is None or shown is None:
        return TOOL_FORMATS
    signed = [each for each in TOOL_FORMATS if sign_in(template.text, each.signs)]
    fitting = [each for each in signed if each.frame is not None or reads(each, shown)]
    found = None if fitting else read_back(shown)
    if found is None or _is_header(found, signed):
        return tuple(fitting) or TOOL_FORMATS
    return (found,)


def _is_header(found: ToolFormat, signed: list[ToolFormat]) -> bool:
    """Whether the marks that were found are those around a message, as in Llama 4's templates: its
    calls have none of their own."""
    opens = "".join(found.opens)
    marks = [mark for each in signed if each.is_bare for mark in markers_of(each)]
    return bool(signed) and ("header" in opens or any(opens.startswith(mark) for mark in marks))


def _shown(template: ChatTemplate) -> Shown | None:
    """What the template writes where the model calls."""
    if "tool" not in template.text:
        return None
    special = tuple(template.special_tokens.items())
    return _shown_once(template.source, template.tools_source, special)


@lru_cache(maxsize=8)
def _shown_once(
    source: str, tools_source: str | None, special_tokens: tuple[tuple[str, str], ...]
) -> Shown | None:
    """Rendered in a process with limits, as every chat is."""
    template = ChatTemplate(source, tools_source=tools_source, special_tokens=dict(special_tokens))
    process = TemplateProcess(template)
    try:
        return shown_by(
            lambda messages, tools: process.render(
                messages, tools=tools, add_generation_prompt=False
            )
        )
    finally:
        process.close()
