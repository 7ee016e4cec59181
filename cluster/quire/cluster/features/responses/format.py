"""Answers of OpenAI's ``/v1/responses``: output items, whole or as the events of a stream.

    response.created, response.in_progress
    response.output_item.added               for each item
        response.content_part.added          of a message or of reasoning
        response.….delta                     of its text, or of a call's arguments
        response.….done
        response.content_part.done
    response.output_item.done
    response.completed                       or incomplete: max_output_tokens; or failed

Item ids derive from the request's id, so they stay equal if another group continues the stream.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from quire.cluster.dialects.events import CallArguments, CallBegun, CallEnded, Content, Reasoning
from quire.cluster.edge.openai_format import Format, Json
from quire.cluster.edge.openai_schema import GenerationBody, StreamOptions
from quire.cluster.features.responses.schema import ResponsesBody
from quire.cluster.features.responses.tools import input_of
from quire.cluster.gateway.chunk import Chunk

_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_PART_TYPES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponsesFormat(Format):
    """``asked``: the fields of the request that the answer repeats."""

    def __init__(self, *, asked: Json, **fields: Any) -> None:
        super().__init__(**fields)
        self._asked = asked
        self._custom = {tool["name"] for tool in asked["tools"] if tool["type"] == "custom"}
        self._status = "in_progress"
        self._items: list[Json] = []
        self._texts: list[str] | None = None
        """Texts of the open item; ``None`` if no item is open."""
        self._num_events = 0

    @classmethod
    def of(cls, body: GenerationBody) -> Callable[..., Format]:
        assert isinstance(body, ResponsesBody)
        return partial(cls, asked=body.echoed())

    def take(self, chunk: Chunk) -> None:
        self.stream(chunk, StreamOptions())

    def whole(self) -> Json:
        if self._status == "in_progress":
            self._fail()
        return self._response()

    def stream(self, chunk: Chunk, options: StreamOptions) -> list[Json]:
        self._count(chunk)
        told = []
        if not self._num_events:
            told = [self._said("created"), self._said("in_progress")]
        reason = chunk.finish_reason
        for event in self._answers[0].events(chunk.text, is_last=reason is not None):
            match event:
                case Content(text):
                    told += self._say("message", text)
                case Reasoning(text):
                    told += self._say("reasoning", text)
                case CallBegun(index, name):
                    call_id = self._answers[0].call_id(index)
                    is_custom = name in self._custom
                    kind = "custom_tool_call" if is_custom else "function_call"
                    more = {"input" if is_custom else "arguments": ""}
                    told += self._begin(kind, call_id=call_id, name=name, **more)
                case CallArguments(_, text):
                    told += self._add(text)
                case CallEnded(_, is_whole):
                    told += self._end("completed" if is_whole else "incomplete")
        if reason is not None:
            if not self._items:
                told += self._begin("message", role="assistant", content=[])
            self._status = "completed" if reason == "stop" else "incomplete"
            told += self._end(self._status)
            told.append(self._said(self._status))
        return told

    def stream_error(self, error: Json) -> Json:
        self._fail()
        code = "rate_limit_exceeded" if error["error"]["type"] == "rate_limit_error" else None
        said = {**error["error"], "code": code or "server_error"}
        return self._event("response.failed", response=self._response() | {"error": said})

    def _fail(self) -> None:
        self._end("incomplete")
        self._status = "failed"

    def _response(self) -> Json:
        is_done, is_cut = self._status == "completed", self._status == "incomplete"
        header = {**self._header}
        return {
            "id": header.pop("id"),
            "object": "response",
            "created_at": header.pop("created"),
            "completed_at": int(time.time()) if is_done else None,
            "status": self._status,
            **header,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*self._items],
            "usage": self._usage() if self._status != "in_progress" else None,
            **self._asked,
        }

    def _usage(self) -> Json:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached, "cache_write_tokens": 0},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt + self._num_output,
        }

    def _say(self, kind: str, text: str) -> list[Json]:
        """Adds text to the open item; begins a new one unless the open item is of ``kind``."""
        told = []
        if self._texts is None or self._items[-1]["type"] != kind:
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            told = self._begin(kind, **more, content=[])
        return told + self._add(text)

    def _begin(self, kind: str, **fields: object) -> list[Json]:
        told = self._end()
        request_id = str(self._header["id"]).partition("_")[2]
        name = f"{_ID_PREFIXES[kind]}_{request_id}_{len(self._items)}"
        item = {"id": name, "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._texts = []
        told.append(self._of_item("response.output_item.added", item=item))
        if kind in _PART_TYPES:
            told.append(self._of_part("response.content_part.added", part=_part(kind, "")))
        return told

    def _add(self, text: str) -> list[Json]:
        assert self._texts is not None
        self._texts.append(text)
        if self._items[-1]["type"] == "custom_tool_call":
            return []  # The input is known when the arguments are whole.
        return [self._of_text("delta", delta=text)]

    def _end(self, status: str = "completed") -> list[Json]:
        """Ends the open item, if any."""
        if self._texts is None:
            return []
        text, self._texts = "".join(self._texts), None
        item = self._items[-1]
        kind = item["type"]
        if kind == "function_call":
            told = [self._of_text("done", arguments=text, name=item["name"])]
            done: Json = {"arguments": text}
        elif kind == "custom_tool_call":
            text = input_of(text)
            told = [self._of_text("delta", delta=text), self._of_text("done", input=text)]
            done = {"input": text}
        else:
            part = _part(kind, text)
            told = [
                self._of_text("done", text=text),
                self._of_part("response.content_part.done", part=part),
            ]
            done = {"content": [part]}
        # Replaced, not changed: events already sent refer to the old object.
        self._items[-1] = item = {**item, **done, "status": status}
        return [*told, self._of_item("response.output_item.done", item=item)]

    def _said(self, what: str) -> Json:
        return self._event(f"response.{what}", response=self._response())

    def _of_text(self, what: str, /, **fields: object) -> Json:
        kind = self._items[-1]["type"]
        if kind == "function_call":
            return self._of_id(f"response.function_call_arguments.{what}", **fields)
        if kind == "custom_tool_call":
            return self._of_id(f"response.custom_tool_call_input.{what}", **fields)
        more: Json = {"logprobs": []} if kind == "message" else {}
        return self._of_part(f"response.{_PART_TYPES[kind]}.{what}", **fields, **more)

    def _of_part(self, name: str, /, **fields: object) -> Json:
        return self._of_id(name, content_index=0, **fields)

    def _of_id(self, name: str, /, **fields: object) -> Json:
        return self._of_item(name, item_id=self._items[-1]["id"], **fields)

    def _of_item(self, name: str, /, **fields: object) -> Json:
        return self._event(name, output_index=len(self._items) - 1, **fields)

    def _event(self, name: str, /, **fields: object) -> Json:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": name, "sequence_number": number, **fields}


def _part(kind: str, text: str) -> Json:
    part: Json = {"type": _PART_TYPES[kind], "text": text}
    return part | ({"annotations": [], "logprobs": []} if kind == "message" else {})
