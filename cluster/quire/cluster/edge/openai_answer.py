"""One choice of a chat in OpenAI's form: content, reasoning and tool calls, whole or as deltas."""

import hashlib
from typing import Any

from quire.cluster.dialects.dialect import Dialect
from quire.cluster.dialects.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
)
from quire.cluster.dialects.parser import OutputParser
from quire.cluster.dialects.tools import ToolUse

Json = dict[str, Any]


class Answer:
    """Parses one choice. ``name`` is unique among all choices: ids of tool calls derive from it."""

    def __init__(
        self,
        name: str,
        *,
        dialect: Dialect,
        tool_use: ToolUse,
        is_reasoning: bool,
        goes_on: bool,
    ) -> None:
        self.has_calls = False
        """Whether there are tool calls and all of them are whole."""
        self._name = name
        self._calls = dialect.calls
        self._given_ids: dict[int, str] = {}
        self._is_parallel = tool_use.is_parallel
        self._parser = OutputParser(
            calls=dialect.calls,
            tools=tool_use.tools,
            reasoning=dialect.reasoning,
            is_reasoning=is_reasoning,
            goes_on=goes_on,
            has_form=tool_use.has_form,
        )

    def deltas(self, text: str, *, is_last: bool) -> list[Json]:
        """The deltas that ``text`` adds to the message."""
        return [
            delta for event in self.events(text, is_last=is_last) if (delta := self._delta(event))
        ]

    def message(self, text: str) -> Json:
        """The whole message. ``text`` is all of the choice's text."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[Json] = []
        for event in self.events(text, is_last=True):
            if isinstance(event, Content):
                content.append(event.text)
            elif isinstance(event, Reasoning):
                reasoning.append(event.text)
            elif isinstance(event, CallBegun):
                calls.append(self._call(event))
            elif isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
        shown = "".join(content)
        message: Json = {"role": "assistant", "content": shown, "refusal": None}
        if calls:
            message |= {"content": shown or None, "tool_calls": calls}
        return message | (_reasoning("".join(reasoning)) if reasoning else {})

    def events(self, text: str, *, is_last: bool) -> list[Event]:
        """The events that ``text`` adds to the answer, independent of any API's format."""
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.finish()
        if not self._is_parallel:  # As OpenAI's API promises it: what a model says more is dropped.
            events = [event for event in events if getattr(event, "index", 0) == 0]
        for event in events:
            if isinstance(event, CallBegun):
                self.has_calls = event.index == 0 or self.has_calls
                self._given_ids[event.index] = event.given_id
            elif isinstance(event, CallEnded):
                self.has_calls &= event.is_whole
        return events

    def _delta(self, event: Event) -> Json | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _reasoning(event.text)
        if isinstance(event, CallBegun):
            return {"tool_calls": [{"index": event.index, **self._call(event)}]}
        if isinstance(event, CallArguments):
            more = {"index": event.index, "function": {"arguments": event.text}}
            return {"tool_calls": [more]}
        return None

    def call_id(self, index: int) -> str:
        """The id of a tool call that has begun."""
        assert self._calls is not None
        if given_id := self._given_ids.get(index):
            return given_id
        digest = hashlib.sha256(f"{self._name}/{index}".encode()).hexdigest()
        return self._calls.id_prefix + digest[: self._calls.id_chars]

    def _call(self, event: CallBegun) -> Json:
        return {
            "id": self.call_id(event.index),
            "type": "function",
            "function": {"name": event.name, "arguments": ""},
        }


def _reasoning(text: str) -> Json:
    """Reasoning under both names that clients use."""
    return {"reasoning_content": text, "reasoning": text}
