"""Converts the items of OpenAI's Responses API to the messages of a chat.

Consecutive items of an assistant (reasoning, text and calls) become one message, as in the chat
API. So a conversation has the same tokens, and finds the same cached blocks, through either API.
"""

import json
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.cluster.edge.openai_messages import MANY, ChatTurn, ContentPart
from quire.cluster.features.responses.tools import arguments_of
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import MAX_MESSAGES

_ROLES = ("user", "assistant", "system", "developer")
_CALLS = ("function_call", "custom_tool_call")
_HIDDEN = ("id", "status", "encrypted_content", "result")
"""Fields of other calls that say nothing to the model, or are images."""
_TEXT_PARTS = ("input_text", "output_text", "text")
_REMEDIES = {
    "item_reference": "responses are not kept, send the item itself (clients do with store=False)",
}

Parts = str | Annotated[list[ContentPart], MANY] | None


class InputItem(BaseModel):
    """An item of any kind. Clients send back items of answers with all their fields; those that are
    not declared here are only read of calls of other tools than functions."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = "message"
    role: str | None = None
    content: Parts = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Parts | Annotated[list[dict[str, Any]], MANY] | dict[str, Any] = None
    encrypted_content: str | None = None


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_Items = Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES)]
Input = Annotated[_Items, BeforeValidator(_as_items, json_schema_input_type=str | _Items)]


def turns_of(instructions: str | None, items: Iterable[InputItem]) -> list[ChatTurn]:
    """The messages of the chat. Raises InvalidRequest if an item is of another kind or lacks a
    field."""
    turns: list[dict[str, Any]] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    for index, item in enumerate(items):
        _add(turns, item, f"input[{index}]")
    if not turns:
        raise InvalidRequest("input is empty: send a text or a list of items", param="input")
    return [ChatTurn(**turn) for turn in turns]


def _add(turns: list[dict[str, Any]], item: InputItem, place: str) -> None:
    if item.type == "message":
        role, text = _given(item, "role", place), _text(item, "content", place)
        if role not in _ROLES:
            raise InvalidRequest(
                f"{place}.role={role[:64]!r}: must be {', '.join(_ROLES)}", param=f"{place}.role"
            )
        if role != "assistant":
            # Templates know this role; many skip the other.
            role = "system" if role == "developer" else role
            turns.append({"role": role, "content": text})
        else:
            _assistant(turns, unless=("content", "tool_calls"))["content"] = text
    elif item.type == "reasoning":
        if item.encrypted_content is not None:
            raise InvalidRequest(
                f"{place}: encrypted_content cannot be read here: leave it out", param=place
            )
        if item.content:
            turn = _assistant(turns, unless=("reasoning_content", "content", "tool_calls"))
            turn["reasoning_content"] = _text(item, "content", place, kinds=("reasoning_text",))
    elif item.type in _CALLS:
        function = {"name": _given(item, "name", place), "arguments": _arguments(item, place)}
        call = {"id": _given(item, "call_id", place), "type": "function", "function": function}
        _assistant(turns).setdefault("tool_calls", []).append(call)
    elif item.type.endswith("_call_output"):
        call_id, text = _given(item, "call_id", place), _text(item, "output", place)
        turns.append({"role": "tool", "tool_call_id": call_id, "content": text})
    elif item.type.endswith("_call"):
        _add_other_call(turns, item)
    else:
        remedy = _REMEDIES.get(item.type, "send messages, calls, their outputs and reasoning")
        raise InvalidRequest(
            f"{place}: an item of type {item.type!r} is not supported: {remedy}", param=place
        )


def _arguments(item: InputItem, place: str) -> str:
    if item.type == "custom_tool_call":
        return arguments_of(_given(item, "input", place))
    return _given(item, "arguments", place)


def _add_other_call(turns: list[dict[str, Any]], item: InputItem) -> None:
    """Adds the call of another tool than a function. Its result follows if it has a ``call_id``;
    otherwise it ran on a server, and the model is told of it in the assistant's text."""
    kind = item.type.removesuffix("_call")
    fields = {**(item.model_extra or {}), "output": item.output, "arguments": item.arguments}
    shown = {name: value for name, value in fields.items() if name not in _HIDDEN and value}
    text = json.dumps(shown, ensure_ascii=False)
    if item.call_id is not None:
        function = {"name": item.name or kind, "arguments": text}
        call = {"id": item.call_id, "type": "function", "function": function}
        _assistant(turns).setdefault("tool_calls", []).append(call)
    else:
        _assistant(turns, unless=("content", "tool_calls"))["content"] = f"[{kind}: {text}]"


def _assistant(turns: list[dict[str, Any]], *, unless: Iterable[str] = ()) -> dict[str, Any]:
    """The assistant message under construction; a new one if it has one of the fields
    ``unless``."""
    if not turns or turns[-1]["role"] != "assistant" or any(name in turns[-1] for name in unless):
        turns.append({"role": "assistant"})
    return turns[-1]


def _given(item: InputItem, name: str, place: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise InvalidRequest(
            f"{place}.{name}: an item of type {item.type!r} must have it", param=f"{place}.{name}"
        )
    return str(value)


def _text(item: InputItem, name: str, place: str, *, kinds: tuple[str, ...] = _TEXT_PARTS) -> str:
    value = getattr(item, name)
    if value is None or isinstance(value, str):
        return value if value is not None else _given(item, name, place)
    if not all(isinstance(part, ContentPart) for part in value):
        if item.type in ("function_call_output", "custom_tool_call_output"):
            raise InvalidRequest(
                f"{place}.{name}: must be a text or a list of parts", param=f"{place}.{name}"
            )
        return json.dumps(value, ensure_ascii=False)
    for part in value:
        if part.type not in kinds or part.text is None:
            raise InvalidRequest(
                f"{place}.{name}: a part of type {part.type!r} is not supported: this model reads "
                f"text, send parts of type {kinds[0]!r}",
                param=f"{place}.{name}",
            )
    return "".join(part.text or "" for part in value)
