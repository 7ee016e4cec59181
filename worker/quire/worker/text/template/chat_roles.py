"""Finds out which messages a chat template shows, and brings a chat into a form in which it shows
all of them.

A template is a program: whether it shows a role, and where, is tried with short chats.
"""

import re
import reprlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quire.worker.request.errors import InvalidRequest

if TYPE_CHECKING:
    from quire.worker.text.tokenizer import Message

Render = Callable[[Sequence["Message"], Sequence[Any] | None], str | None]
"""Renders messages and tools; ``None`` if the template refuses them."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SYSTEM = ("system", "developer")
PROBE = "quireprobe"
USER: "Message" = {"role": "user", "content": "?"}
_ANSWER: "Message" = {"role": "assistant", "content": "?"}
CALL_ID = "probe0000"  # Mistral's templates require nine characters.
_CALL: "Message" = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": CALL_ID, "function": {"name": "f", "arguments": {"p": "?"}}}
    ],
}
_PARAMETERS = {"type": "object", "properties": {"p": {"type": "string", "description": "?"}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "?", "parameters": {**_PARAMETERS, "required": ["p"]}},
}


class Roles:
    """The roles of one template."""

    def __init__(self, source: str, render: Render) -> None:
        self._source = source
        self._render = render
        self._known: dict[tuple[str, bool], bool | None] = {}
        self._joins: dict[str, bool] = {}

    def arranged(self, messages: "Sequence[Message]") -> "list[Message]":
        """The messages, in the order and with the roles that the template shows.

        A ``developer`` whom it does not know is ``system``. System messages that it does not show
        behind others are joined with the first one. Consecutive messages of a user or an assistant
        are joined if it refuses them.

        Raises:
            InvalidRequest: A role is unknown, or the template would leave a message out.
        """
        arranged = []
        for place, message in enumerate(messages):
            role = self._role(message, place)
            if role == "developer" and not self._shows(role, is_first=True):
                message = {**message, "role": "system"}
            arranged.append(message)
        arranged = self._joined(self._with_system_first(arranged))
        for place, message in enumerate(arranged):
            self._check(message, place)
        if len(arranged) == 1:
            self._check_alone(arranged[0])
        return arranged

    def _role(self, message: "Message", place: int) -> str:
        role = message.get("role")
        if role in ROLES:
            return str(role)
        if isinstance(role, str) and re.search(rf"""(['"]){re.escape(role)}\1""", self._source):
            return role
        raise InvalidRequest(
            f"messages[{place}].role={reprlib.repr(role)}: must be one of {', '.join(ROLES)}, or "
            "another role that the chat template names",
            param="messages",
        )

    def _with_system_first(self, messages: "list[Message]") -> "list[Message]":
        if not any(each["role"] in _SYSTEM and each.get("content") for each in messages[1:]):
            return messages
        tried = [_short(message, place) for place, message in enumerate(messages)]
        probes = [each["content"] for each in tried if each["content"] != "?"]
        # Some templates show only the first one, others only the last one.
        shown = self._render(tried, None) or ""
        if all(probe in shown for probe in probes):
            return messages
        system = [each for each in messages if each["role"] in _SYSTEM]
        texts = [str(each["content"]) for each in system if each.get("content")]
        first = {**system[0], "content": "\n\n".join(texts)}
        return [first, *(each for each in messages if each["role"] not in _SYSTEM)]

    def _joined(self, messages: "list[Message]") -> "list[Message]":
        joined: list[Message] = []
        for message in messages:
            before = joined[-1] if joined else None
            if before is not None and self._are_one(before, message):
                text = "\n\n".join(str(each["content"]) for each in (before, message))
                joined[-1] = {**before, "content": text}
            else:
                joined.append(message)
        return joined

    def _are_one(self, before: "Message", message: "Message") -> bool:
        role = message["role"]
        is_text = all(each.keys() == {"role", "content"} for each in (before, message))
        if before["role"] != role or role not in ("user", "assistant") or not is_text:
            return False
        if role not in self._joins:
            one = USER if role == "user" else _ANSWER
            chats = ([USER, one], [USER, one, one])[role != "user" :]
            self._joins[role] = all(self._render(chat, None) is None for chat in chats)
        return self._joins[role]

    def _check(self, message: "Message", place: int) -> None:
        """Raises InvalidRequest if the template leaves the message out."""
        role = message["role"]
        if role in ("user", "assistant") or not message.get("content"):
            return
        if self._shows(role, is_first=place == 0) is False:
            raise InvalidRequest(
                f"messages: the model's chat template shows no message of the role {role!r} "
                f"{'behind others' if place else 'at the beginning'}, so that its text would be "
                "lost: send it with another role",
                param="messages",
            )

    def _check_alone(self, message: "Message") -> None:
        """Raises InvalidRequest if the template leaves out a system message without any other."""
        if message["role"] not in _SYSTEM or not message.get("content"):
            return
        text = self._render([{"role": message["role"], "content": PROBE}], None)
        if text is not None and PROBE not in text:
            raise InvalidRequest(
                "messages: the model's chat template shows a system message only with a user's: "
                "add one",
                param="messages",
            )

    def _shows(self, role: str, *, is_first: bool) -> bool | None:
        """Whether the template shows a message of ``role``, before all others or behind them;
        ``None`` if it refuses it."""
        if (role, is_first) not in self._known:
            message = {"role": role, "content": PROBE, "name": "f", "tool_call_id": CALL_ID}
            if role != "tool":
                message = {"role": role, "content": PROBE}
            before = [[]] if is_first else [[USER, _ANSWER], [USER, _CALL], [USER]]
            texts = (
                self._render([*start, message, *end], tools)
                for tools in (None, [TOOL])
                for start in before
                for end in ([USER], [])
            )
            found = {text if text is None else PROBE in text for text in texts}
            self._known[role, is_first] = True in found or (False if False in found else None)
        return self._known[role, is_first]


def _short(message: "Message", place: int) -> "Message":
    """The message with short content, which in a system message occurs nowhere else."""
    is_system = message["role"] in _SYSTEM and message.get("content")
    return {**message, "content": f"{PROBE}{place}." if is_system else "?"}
