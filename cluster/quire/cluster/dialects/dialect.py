"""The dialect of a model: how it writes tool calls and reasoning. The operator names the formats;
otherwise they are found in the model's response template or chat template."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from quire.cluster.dialects.formats import (
    TOOL_FORMATS,
    ToolFormat,
    check_parsers,
    markers_of,
)
from quire.cluster.dialects.tools import ToolUse
from quire.cluster.features.template_reading.probe import Probed, Shown, probed
from quire.cluster.features.template_reading.read_back import finds, read_back, reads
from quire.cluster.features.template_reading.response_template import calls_from
from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.errors import InvalidRequest, UnreadableTemplate
from quire.worker.text.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    reasoning_from,
    sign_in,
)
from quire.worker.text.template.chat_template import ChatTemplate
from quire.worker.text.template.process import TemplateProcess
from quire.worker.text.tokenizer import Tokenizer

_UNDEFINED = re.compile(r"'(\w+)' is undefined")
_MAX_SENT = 4
_log = logging.getLogger(__name__)

F = TypeVar("F", ToolFormat, ReasoningFormat)


_NO_TOOLS = "it does not name tools"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    calls: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    why_no_calls: str = ""
    """Why the chat template shows no format of calls, if known."""
    parses_calls: bool = True
    """Whether calls are parsed. If false, the operator wants them to stay text."""
    special_tokens: Mapping[int, str] = field(default_factory=dict)
    """The tokenizer's special tokens that serve as markers in this dialect, by token id."""

    def check(self, use: ToolUse) -> None:
        """Raises InvalidRequest if the model's format of tool calls is not known, or if calls
        cannot be made in the way that the request asks for."""
        if not use.tools:
            return
        if self.calls is None and (self.parses_calls or use.has_form):
            because = f" ({self.why_no_calls})" if self.why_no_calls else ""
            remedy = "--tool-call-parser"
            if self.why_no_calls == _NO_TOOLS:  # A parser would not put them into the prompt.
                remedy = "a --chat-template that shows them"
            raise InvalidRequest(
                "tools are not supported: the model's chat template shows none of the known "
                f"formats of calls{because}, serve it with {remedy}",
                param="tools",
            )

    def shown_token_ids(self, *, with_calls: bool) -> frozenset[int]:
        """Special tokens that the text must keep so that the parser of the answer sees them."""
        has_marks = with_calls or (self.calls is not None and self.calls.around is not None)
        texts = [*markers_of(self.calls if has_marks else None), *markers_of(self.reasoning)]
        return frozenset(
            token_id
            for token_id, token in self.special_tokens.items()
            if any(token in text for text in texts)
        )

    def reasons(self, tokenizer: Tokenizer, prompt_token_ids: TokenIds) -> bool | None:
        """True if the prompt ends within reasoning, false if it has ended the reasoning; ``None``
        if the prompt leaves that to the model."""
        return self.reasoning.begun(tokenizer, prompt_token_ids) if self.reasoning else False

    def goes_on(self, tokenizer: Tokenizer, prompt_token_ids: TokenIds) -> bool:
        """Whether the prompt, which ends within reasoning, already has reasoning text."""
        return self.reasoning is not None and self.reasoning.goes_on(tokenizer, prompt_token_ids)


def choose_dialect(
    tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> Dialect:
    """The dialect with the formats of these names. "auto" takes the format that the response
    template describes, or otherwise the one that the chat template shows, if any. The log says
    which one was chosen and why. Raises ConfigError if there is no format of that name."""
    check_parsers(tool_call_parser, reasoning_parser)
    may_fit = tool_call_parser == "auto" and tokenizer.response_template is None
    formats, why = _fitting(tokenizer) if may_fit else (TOOL_FORMATS, "")
    calls = _choose("calls of tools", tool_call_parser, formats, calls_from, tokenizer, why)
    reasoning = _choose("reasoning", reasoning_parser, REASONING_FORMATS, reasoning_from, tokenizer)
    texts = [*markers_of(calls), *markers_of(reasoning)]
    return Dialect(
        calls=calls,
        reasoning=reasoning,
        why_no_calls="" if calls is not None else why,
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
    why_none: str = "",
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
    because = f": {why_none}" if why_none else ""
    _log.info("%s: none are read: the chat template shows no known format%s", what, because)
    return None


def _fitting(tokenizer: Tokenizer) -> tuple[tuple[ToolFormat, ...], str]:
    """The formats that can read the calls rendered by the chat template, and, if there are none,
    the reason. They come from the table, or otherwise one is derived from the template. If the
    template shows no calls, the whole table is returned."""
    template = tokenizer.template
    told = _told(template) if template is not None else Probed()
    if template is None or not told.views:
        return TOOL_FORMATS, told.reason
    signed = [each for each in TOOL_FORMATS if sign_in(template.text, each.signs)]

    def those(test: Callable[[ToolFormat, Shown], bool]) -> tuple[ToolFormat, ...]:
        return tuple(each for each in signed if any(test(each, view) for view in told.views))

    framed = tuple(each for each in signed if each.frame is not None)
    if fitting := framed or those(reads):
        return fitting, ""
    for found in filter(None, map(read_back, told.views)):
        return (tuple(signed) if _is_header(found, signed) else (found,)), ""
    return those(finds), "it writes calls in no form that can be read"


def _is_header(found: ToolFormat, signed: list[ToolFormat]) -> bool:
    """Whether the marks that were found surround a message and not a call, as in Llama 4's
    templates, whose calls have no marks of their own."""
    opens = "".join(found.opens)
    marks = [mark for each in signed if each.is_bare for mark in markers_of(each)]
    return bool(signed) and ("header" in opens or any(opens.startswith(mark) for mark in marks))


def _told(template: ChatTemplate) -> Probed:
    """How the template renders tool calls."""
    if "tool" not in template.text:
        return Probed(reason=_NO_TOOLS)
    special = tuple(template.special_tokens.items())
    return _told_once(template.source, template.tools_source, special)


@lru_cache(maxsize=8)
def _told_once(
    source: str, tools_source: str | None, special_tokens: tuple[tuple[str, str], ...]
) -> Probed:
    """Renders in a process with limits, as for every chat. If the template refuses without a
    variable that clients would send, the variable is set to a placeholder text."""
    template = ChatTemplate(source, tools_source=tools_source, special_tokens=dict(special_tokens))
    process = TemplateProcess(template)
    sent: dict[str, str] = {}

    def render(
        messages: list[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], prompts: bool
    ) -> str:
        while True:
            try:
                return process.render(
                    messages, tools=tools, add_generation_prompt=prompts, template_kwargs=sent
                )
            except InvalidRequest as error:
                wanted = _UNDEFINED.search(str(error))
                if wanted is None or wanted[1] in sent or len(sent) == _MAX_SENT:
                    raise
                sent[wanted[1]] = "?"

    try:
        return probed(render)
    finally:
        process.close()
