"""Probes how a chat template renders tool calls, by rendering calls with known names and
arguments."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.cluster.dialects.formats import Around
from quire.cluster.dialects.tools import Tool
from quire.worker.request.errors import InvalidRequest
from quire.worker.text.template.chat_template import NO_CALLS

Render = Callable[[list[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Renders a chat with its tools to text; the flag says whether the generation prompt follows.
Raises InvalidRequest if the template refuses."""

_USER = {"role": "user", "content": "?"}
TEXT = "quiretext"
_MAX_MARK_CHARS = 64
ARGUMENTS: dict[str, Any] = {
    "quirekeya": "quirevalue",
    "quirekeyb": 7,
    "quirekeyc": [1, "x"],
    "quirekeyd": True,
    "quirekeye": {"u": 2},
}
KINDS = {"quirekeya": "string", "quirekeyb": "number", "quirekeyc": "array"} | {
    "quirekeyd": "boolean",
    "quirekeye": "object",
}
# Templates that show Python types need those of nested values, too.
_MORE: dict[str, Any] = {
    "array": {"items": {}},
    "object": {"additionalProperties": {"type": "number"}},
}
_SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": kind, "description": "?", **_MORE.get(kind, {})}
        for name, kind in KINDS.items()
    },
    "required": [*KINDS],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class MarkedCall:
    name: str
    call_id: str

    @property
    def message(self) -> Mapping[str, Any]:
        function = {"name": self.name, "arguments": json.dumps(ARGUMENTS)}
        return {"id": self.call_id, "type": "function", "function": function}

    @property
    def tool(self) -> Mapping[str, Any]:
        described = {"name": self.name, "description": "?", "parameters": _SCHEMA}
        return {"type": "function", "function": described}


FIRST, SECOND = MarkedCall("quirefna", "quireid01"), MarkedCall("quirefnb", "quireid02")
_TOOLS = [FIRST.tool, SECOND.tool]
PARSED_TOOLS = [
    Tool(name=call.name, parameters=_SCHEMA, spec=call.tool) for call in (FIRST, SECOND)
]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """How a template renders an assistant's calls."""

    one: str
    """Text of one call."""
    both: str | None
    """Text of two calls; ``None`` if the template refuses them or shows only one."""
    takes_any_id: bool = True
    """Whether any id is accepted. If not, ids have nine characters."""
    plain: str = ""
    """An answer that is not a call, if text has marks: the marks around `TEXT`."""
    around: Around | None = None
    """The marks of text, if it has some."""
    prompt: str = ""
    """The end of the prompt, if text has marks."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """The result of probing a template."""

    views: tuple[Shown, ...] = ()
    """Possible views of where the calls begin and end, the likeliest first."""
    reason: str = ""
    """Why there are no views."""


def probed(render: Render) -> Probed:
    """The result of probing the template behind ``render``."""
    refusals: list[str] = []

    def rendered(*messages: Mapping[str, Any], prompts: bool = False) -> str:
        try:
            return render([_USER, *messages], _TOOLS, prompts)
        except InvalidRequest as error:
            if NO_CALLS not in str(error):
                refusals.append(str(error))
            return ""

    def called(*calls: Mapping[str, Any]) -> str:
        message = {"role": "assistant", "tool_calls": calls}
        return rendered({**message, "content": None}) or rendered({**message, "content": ""})

    plain = rendered({"role": "assistant", "content": TEXT})
    one, both = called(FIRST.message), called(FIRST.message, SECOND.message)
    if TEXT not in plain or (refusals and not one):
        return Probed(reason=(refusals or ["it does not show what an assistant says"])[0])
    if FIRST.name not in one or FIRST.name in common_end(one, plain):
        return Probed(reason="it does not show the calls of an assistant")
    long = called({**FIRST.message, "id": "call_" + 24 * "0"})
    said = {"role": "assistant", "content": TEXT, "tool_calls": [FIRST.message]}
    prompt = rendered(prompts=True)
    if prompt == rendered():
        prompt = ""  # It begins no answer; the role does not mark text.
    views = (_marked(prompt, plain, one, both, rendered(said)), _compared(plain, one, both))
    return Probed(
        views=tuple(
            replace(view, takes_any_id=bool(long))
            for view in views
            if view is not None and FIRST.name in view.one
        ),
        reason="its calls cannot be told from text",
    )


def _compared(plain: str, one: str, both: str) -> Shown | None:
    """Finds calls by comparing them with plain text; ``None`` if text has marks, too."""
    behind = plain.partition(TEXT)[2]
    before = len(common_start(plain, one))
    cut = one.rfind("<", 0, before)  # Keeps tags whole, and cuts before a differing tag.
    if cut > one.rfind(">", 0, before):
        before = cut
    after = len(one) - len(common_end(behind, one))
    if one.rfind("<", before, after) > one.rfind(">", before, after):
        after = one.find(">", after) + 1
    if FIRST.name not in one[before:] or _tags(common_start(behind, one[before:])):
        return None
    # A mark that ends the calls and also occurs within them belongs to the calls.
    while (tag := re.match(r"<[^<>\s]*>", one[after:])) and tag[0] in one[before:after]:
        after += len(tag[0])
    start = one.index(FIRST.name, before)
    start = before + len(one[before:start]) - len(_thoughtless(one[before:start]))
    has_both = both.startswith(one[:before]) and SECOND.name in both[before:]
    end = len(both) - (len(one) - after)
    return Shown(one=one[start:after], both=both[start:end] if has_both else None)


def _marked(prompt: str, plain: str, one: str, both: str, said: str) -> Shown | None:
    """The answer after ``prompt``, if text has marks; ``None`` if it has none. ``said``: rendering
    of a text with a call."""
    if not prompt or not all(text.startswith(prompt) for text in (plain, one)):
        return None
    both = both if both.startswith(prompt) else ""
    lead, _, tail = plain.removeprefix(prompt).partition(TEXT)
    opens = _thoughtless(lead)
    begun = one.removeprefix(prompt).removeprefix(lead)
    told = said.rpartition(TEXT)[2]
    close = _whole_tags(common_start(tail, told if TEXT in said else begun))
    if not opens.strip() and (not close.strip() or not begun.startswith(close)):
        return None
    rest = tail.removeprefix(close)
    tags = _tags(rest)
    end = next((each for each in (tail, rest) if each and one.endswith(each)), "")

    def calls_in(text: str) -> str:
        text = text.removeprefix(prompt).removeprefix(lead).removesuffix(end)
        behind = text.removeprefix(close)
        # A call begins with a mark, possibly with the mark behind text.
        return behind if behind.startswith("<") else text

    last = [rest.strip().removesuffix(tags[-1])] if len(tags) > 1 else []
    closes = (each.strip() for each in (close, *last))
    return Shown(
        one=calls_in(one),
        both=calls_in(both) if SECOND.name in both.removeprefix(prompt) else None,
        plain=f"{opens}{TEXT}{tail.removesuffix(rest) + ''.join(last)}",
        around=Around(opens=opens, closes=tuple(dict.fromkeys(filter(None, closes)))),
        prompt=prompt[-_MAX_MARK_CHARS:],
    )


def _thoughtless(text: str) -> str:
    """The text behind the marks of reasoning."""
    return re.sub(r"(?is).*think(?:[^<>]*>|<[^<>]*>)", "", text)


def _whole_tags(text: str) -> str:
    """``text`` without an incomplete tag at its end; empty if it then has no tag."""
    text = re.sub(r"<[^>]*$", "", text)
    return text if _tags(text) else ""


def common_start(*texts: str) -> str:
    pairs = enumerate(zip(*texts, strict=False))
    shortest = min(map(len, texts))
    return texts[0][: next((at for at, chars in pairs if len(set(chars)) > 1), shortest)]


def common_end(*texts: str) -> str:
    return common_start(*(text[::-1] for text in texts))[::-1]


def _tags(text: str) -> list[str]:
    return re.findall(r"<[^<>\s]*>", text)
