"""Converts the messages of Anthropic's API to those of a chat.

A message's thinking, text and calls become one chat message. So a conversation has the same tokens,
and finds the same cached blocks, through either API.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.cluster.edge.openai_messages import MANY, ChatTurn
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import MAX_MESSAGES


class Block(BaseModel):
    """A content block of a message, of any type."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_BlockList = Annotated[list[Block], MANY]
Blocks = Annotated[_BlockList, BeforeValidator(_as_blocks, json_schema_input_type=str | _BlockList)]


class Turn(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: Blocks


Turns = Annotated[list[Turn], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class _Result(BaseModel):
    """The result of a tool call."""

    content: Blocks


# By type of block: its required fields, and the fields that change nothing.
_FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "text": (("text",), ("cache_control",)),
    "thinking": (("thinking",), ("signature",)),
    "tool_use": (("id", "name", "input"), ("cache_control", "caller")),
    "tool_result": (("tool_use_id",), ("content", "is_error", "cache_control")),
}
_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


def turns_of(system: Iterable[Block], turns: Iterable[Turn]) -> list[ChatTurn]:
    """The messages of the chat. Raises InvalidRequest if there is none, or if one has another role,
    a block of an unsupported type, a missing field or an unknown field."""
    said = _texts(system, "system")
    messages: list[_Message] = [{"role": "system", "content": [said]}] if said else []
    num_before = len(messages)
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        if turn.role not in _TYPES:
            raise InvalidRequest(
                f"{place}.role={turn.role[:64]!r}: must be {', '.join(_TYPES)}",
                param=f"{place}.role",
            )
        for name, value in (turn.model_extra or {}).items():
            raise _unknown(place, name, value)
        for number, block in enumerate(turn.content):
            _check(block, f"{place}.content[{number}]", _TYPES[turn.role])
        if turn.role == "system":
            _add_system(messages, _texts(turn.content, place))
        elif turn.role == "assistant":
            _add_assistant(messages, turn.content)
        else:
            _add_user(messages, turn.content, place)
    if len(messages) == num_before:
        raise InvalidRequest("messages is empty: send a list of messages", param="messages")
    if messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "messages: the last one has a tool_use: send its tool_result behind it",
            param="messages",
        )
    return [_joined(message) for message in messages]


def marks_of(system: Iterable[Block], turns: Iterable[Turn]) -> list[tuple[str, object]]:
    """The ``cache_control`` of each block, with the block's place."""
    lists = [("system", system)]
    lists += [(f"messages[{index}].content", turn.content) for index, turn in enumerate(turns)]
    marks = []
    for place, blocks in lists:
        for number, block in enumerate(blocks):
            where = f"{place}[{number}]"
            marks.append((f"{where}.cache_control", (block.model_extra or {}).get("cache_control")))
            within = block.content if isinstance(block.content, list) else ()
            marks += [
                (f"{where}.content[{index}].cache_control", each.get("cache_control"))
                for index, each in enumerate(within)
                if isinstance(each, dict)
            ]
    return marks


_Message = dict[str, Any]
"""A chat message whose text is a list of pieces, of which there may be many."""


def _joined(message: _Message) -> ChatTurn:
    for name in message.keys() & {"content", "reasoning_content"}:
        message[name] = "".join(message[name])
    return ChatTurn(**message)


def _add_system(messages: list[_Message], text: str) -> None:
    """Adds a system message. Consecutive ones are joined: templates read only the first."""
    if messages and messages[-1]["role"] == "system":
        messages[-1]["content"] += ["\n\n", text]
    else:
        messages.append({"role": "system", "content": [text]})


def _add_user(messages: list[_Message], blocks: Sequence[Block], place: str) -> None:
    """Adds a user's turn: each tool result is a message, consecutive texts are one, also those of
    consecutive turns."""
    for number, block in enumerate(blocks):
        if block.type == "tool_result":
            where = f"{place}.content[{number}].content"
            content = "" if block.content is None else block.content
            text = _texts(_Result.model_validate({"content": content}).content, where)
            message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": [text]}
            messages.append(message)
        else:
            _user(messages)["content"].append(block.text)
    if not blocks:
        _user(messages)


def _user(messages: list[_Message]) -> _Message:
    """The user's message at the end; a new one if another's is there."""
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": []})
    return messages[-1]


def _add_assistant(messages: list[_Message], blocks: Iterable[Block]) -> None:
    """Adds an assistant message. Consecutive ones, such as a prefill and its answer, are joined."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    message = messages[-1]
    for block in blocks:
        if block.type == "tool_use":
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            call = {"id": block.id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        else:
            is_thinking = block.type == "thinking"
            name = "reasoning_content" if is_thinking else "content"
            message.setdefault(name, []).append(block.thinking if is_thinking else block.text)


def _texts(blocks: Iterable[Block], place: str) -> str:
    texts = []
    for number, block in enumerate(blocks):
        _check(block, f"{place}[{number}]", ("text",))
        texts.append(block.text or "")
    return "".join(texts)


def _check(block: Block, place: str, types: tuple[str, ...]) -> None:
    if block.type not in types:
        raise InvalidRequest(
            f"{place}: a block of type {block.type[:64]!r} is not supported: "
            f"send {', '.join(types)}",
            param=place,
        )
    needed, ignored = _FIELDS[block.type]
    for name in needed:
        if getattr(block, name) is None:
            raise InvalidRequest(
                f"{place}.{name}: a block of type {block.type!r} must have it",
                param=f"{place}.{name}",
            )
    given = {name: getattr(block, name) for name in block.model_fields_set}
    for name, value in given.items():
        if name not in ("type", *needed, *ignored) and value not in (None, []):
            raise _unknown(place, name, value)


def _unknown(place: str, name: str, value: object) -> InvalidRequest:
    shown = f"{name[:64]}={reprlib.repr(value)}"
    return InvalidRequest(f"{place}: {shown} is not supported: leave it out", param=place)
