"""Converts the items of OpenAI's Responses API to the messages of a chat.

Consecutive items of an assistant (reasoning, text and calls) become one message, as in the chat
API. So a conversation has the same tokens, and finds the same cached blocks, through either API.
"""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.cluster.edge.openai_messages import MANY, ChatTurn, ContentPart
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.request import MAX_MESSAGES

_TEXT_PARTS = ("input_text", "output_text", "text")
_REMEDIES = {
    "item_reference": "responses are not kept, send the item itself (clients do with store=False)",
}

Parts = str | Annotated[list[ContentPart], MANY] | None


class InputItem(BaseModel):
    """An item of any kind. Clients send back items of answers with all their fields; fields that
    are not declared here are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str = "message"
    role: str | None = None
    content: Parts = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts = None
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
    elif item.type == "function_call":
        function = {name: _given(item, name, place) for name in ("name", "arguments")}
        call = {"id": _given(item, "call_id", place), "type": "function", "function": function}
        _assistant(turns).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        call_id, text = _given(item, "call_id", place), _text(item, "output", place)
        turns.append({"role": "tool", "tool_call_id": call_id, "content": text})
    else:
        remedy = _REMEDIES.get(
            item.type, "send message, function_call, function_call_output and reasoning"
        )
        raise InvalidRequest(
            f"{place}: an item of type {item.type!r} is not supported: {remedy}", param=place
        )


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
    for part in value:
        if part.type not in kinds or part.text is None:
            raise InvalidRequest(
                f"{place}.{name}: a part of type {part.type!r} is not supported: this model reads "
                f"text, send parts of type {kinds[0]!r}",
                param=f"{place}.{name}",
            )
    return "".join(part.text or "" for part in value)
