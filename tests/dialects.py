"""Helpers for tests that parse tool calls and reasoning: tools, rendered calls, events and cuts."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tests.call_templates import TAKE_TEXT, TEMPLATES
from transformers.utils.chat_template_utils import render_jinja_template

from quire.cluster.dialects.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)
from quire.cluster.dialects.formats import TOOL_FORMATS, ToolFormat
from quire.cluster.dialects.parser import OutputParser
from quire.cluster.dialects.tools import Tool, ToolUse, check_tool_use
from quire.worker.text.reasoning import REASONING_FORMATS, ReasoningFormat

FORMATS = {each.name: each for each in TOOL_FORMATS}
THINK = next(each for each in REASONING_FORMATS if each.name == "think")
Call = tuple[str, dict[str, Any]]

TYPES = {
    "string": st.text(st.characters(codec="utf-8", exclude_characters="<\x01\x02"), max_size=12),
    "integer": st.integers(-(10**12), 10**12),
    "number": st.floats(allow_nan=False, allow_infinity=False, width=32),
    "boolean": st.booleans(),
    "array": st.lists(st.integers() | st.text("ab]\"'\\,é", max_size=4), max_size=3),
    "object": st.dictionaries(
        st.text("ab", min_size=1, max_size=3), st.none() | st.booleans(), max_size=2
    ),
    "null": st.none(),
}
names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Call]]:
    """Draws tools, and one call of each that its schema allows."""
    tools, calls = [], []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        types = draw(st.dictionaries(names, st.sampled_from(sorted(TYPES)), max_size=4))
        tools.append(tool(name, {key: {"type": kind} for key, kind in types.items()}))
        calls.append((name, {key: draw(TYPES[kind]) for key, kind in types.items()}))
    return tools, calls


def written(form: str, calls: Sequence[Call], *, content: str = "") -> str:
    """The calls as text, rendered by the family's own chat template."""
    if form == "pythonic":
        shown = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
            for name, arguments in calls
        ]
        return f"[{', '.join(shown)}]"
    said = [
        {
            "type": "function",
            "id": f"functions.{name}:{number}" if form == "kimi_k2" else f"{number:09}",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments, ensure_ascii=False)
                if form in TAKE_TEXT
                else arguments,
            },
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content or None, "tool_calls": said}
    rendered: Any = render_jinja_template([[message]], chat_template=TEMPLATES[form])
    return str(rendered[0][0])


def parse(
    form: ToolFormat | str | None,
    pieces: Sequence[str],
    tools: Sequence[Tool],
    *,
    reasoning: ReasoningFormat | None = THINK,
    is_reasoning: bool = False,
    goes_on: bool = False,
    has_form: bool = False,
) -> list[Event]:
    """Parses ``pieces``; consecutive text events of one type are joined."""
    parser = OutputParser(
        calls=FORMATS[form] if isinstance(form, str) else form,
        tools=tools,
        reasoning=reasoning,
        is_reasoning=is_reasoning,
        goes_on=goes_on,
        has_form=has_form,
    )
    events: list[Event] = []
    told = [event for piece in pieces for event in parser.feed(piece)]
    for event in (*told, *parser.finish()):
        last = events[-1] if events else None
        if not isinstance(event, CallBegun | CallEnded) and type(last) is type(event):
            assert not isinstance(last, CallBegun | CallEnded | None)
            events[-1] = replace(last, text=last.text + event.text)
        else:
            events.append(event)
    return events


def calls_of(events: Sequence[Event]) -> list[Call]:
    """The calls in ``events``. Asserts that begin, arguments and end of each are in this order."""
    calls: list[Call] = []
    inner = [event for event in events if not isinstance(event, Content | Reasoning)]
    for number in range(0, len(inner), 3):
        begun, arguments, ended = inner[number : number + 3]
        assert isinstance(begun, CallBegun)
        assert isinstance(arguments, CallArguments)
        assert begun.index == arguments.index == number // 3
        assert ended == CallEnded(begun.index)
        calls.append((begun.name, json.loads(arguments.text)))
    return calls


def cuts(text: str, *, in_two: bool = True) -> Iterator[list[str]]:
    """Ways to cut ``text``: single characters, 20 random ones, and with ``in_two`` all in two."""
    if in_two:
        yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)
    chance = random.Random(text)
    for _ in range(20):
        places = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(1, 9)))
        ends = [*places, len(text)]
        yield [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def required(tools: list[dict[str, Any]], choice: object = "required") -> ToolUse:
    return check_tool_use(tools, choice, is_parallel=True)


def in_json(text: str, form: str, tools: Sequence[Tool]) -> str:
    """Rewrites rendered calls to the form that the grammar allows: no ids, values as JSON."""
    text = re.sub(r', "id": "\d{9}"', "", text)
    if form == "harmony":  # Templates put the function before the channel, models after it.
        text = re.sub(
            r"assistant( to=\S+)<\|channel\|>commentary json",
            r"assistant<|channel|>commentary\1 <|constrain|>json",
            text,
        )
        return text.removeprefix("<|start|>assistant").removesuffix("<|call|>")
    if form != "pythonic":
        return text
    calls = calls_of(parse(form, [text], tools))
    shown = []
    for name, arguments in calls:
        pairs = [f"{key}={json.dumps(arguments[key], ensure_ascii=False)}" for key in arguments]
        shown.append(f"{name}({', '.join(pairs)})")
    return f"[{', '.join(shown)}]"
