"""Answers of Anthropic's ``/v1/messages``: content blocks, whole or as the events of a stream.

message_start
content_block_start          for each block
    content_block_delta      of its text, its thinking or a call's input
content_block_stop
message_delta                the stop reason and the usage
message_stop
"""

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from quire.cluster.dialects.events import CallArguments, CallBegun, Content, Reasoning
from quire.cluster.edge.openai_format import Format, Json
from quire.cluster.edge.openai_schema import StreamOptions
from quire.cluster.gateway.chunk import Chunk

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By type of block: the type of its deltas, and the field that they extend."""
_ERROR_TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
_ERROR_TYPES_OF_STATUS = {404: "not_found_error", 413: "request_too_large"}


class MessagesFormat(Format):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._blocks: list[Json] = []
        self._texts: list[str] | None = None
        """Texts of the open block; ``None`` if no block is open."""
        self._is_begun = False
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}

    def take(self, chunk: Chunk) -> None:
        self.stream(chunk, StreamOptions())

    def whole(self) -> Json:
        self._end()
        return self._message()

    def failed(self, error: Json) -> Json:
        return {**self.whole(), **anthropic_error(error)}

    def stream(self, chunk: Chunk, options: StreamOptions) -> list[Json]:
        self._count(chunk)
        told: list[Json] = []
        if not self._is_begun:
            self._is_begun = True
            message = self._message()
            # This event comes before any output.
            message["usage"]["output_tokens"] = 0
            told.append({"type": "message_start", "message": message})
        reason = chunk.finish_reason
        for event in self._answers[0].events(chunk.text, is_last=reason is not None):
            match event:
                case Content(text):
                    told += self._say("text", text)
                case Reasoning(text):
                    told += self._say("thinking", text)
                case CallBegun(index, name):
                    call_id = self._answers[0].call_id(index)
                    told += self._begin(
                        {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    )
                case CallArguments(_, text):
                    told += self._add(text)
        if reason is not None:
            told += self._end()
            self._stop = self._why(reason, chunk)
            told.append({"type": "message_delta", "delta": self._stop, "usage": self._usage()})
            told.append({"type": "message_stop"})
        return told

    def stream_error(self, error: Json) -> Json:
        return anthropic_error(error)

    def _message(self) -> Json:
        return {
            "id": self._header["id"],
            "type": "message",
            "role": "assistant",
            "model": self._header["model"],
            "content": [*self._blocks],
            **self._stop,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """The usage. Cached tokens do not count as input in this API."""
        return {
            "input_tokens": self._num_prompt - self._num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._num_cached,
            "output_tokens": self._num_output,
        }

    def _why(self, reason: str, chunk: Chunk) -> Json:
        if reason != "stop":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(chunk.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": chunk.stop_reason}
        why = "tool_use" if self._answers[0].has_calls else "end_turn"
        return {"stop_reason": why, "stop_sequence": None}

    def _say(self, kind: str, text: str) -> list[Json]:
        """Adds text to the open block; begins a new one unless the open block is of ``kind``."""
        told: list[Json] = []
        if self._texts is None or self._blocks[-1]["type"] != kind:
            more: Json = {"signature": ""} if kind == "thinking" else {}
            told = self._begin({"type": kind, kind: "", **more})
        return told + self._add(text)

    def _begin(self, block: Json) -> list[Json]:
        told = self._end()
        self._blocks.append(block)
        self._texts = []
        return [*told, self._event("content_block_start", content_block=block)]

    def _add(self, text: str) -> list[Json]:
        if self._texts is None:
            return []
        self._texts.append(text)
        kind, name = _DELTAS[self._blocks[-1]["type"]]
        return [self._event("content_block_delta", delta={"type": kind, name: text})]

    def _end(self) -> list[Json]:
        """Ends the open block, if any."""
        if self._texts is None:
            return []
        text, self._texts = "".join(self._texts), None
        block = self._blocks[-1]
        done = {"input": _input(text)} if block["type"] == "tool_use" else {block["type"]: text}
        # Replaced, not changed: events already sent refer to the old object.
        self._blocks[-1] = {**block, **done}
        return [self._event("content_block_stop")]

    def _event(self, name: str, **fields: object) -> Json:
        return {"type": name, "index": len(self._blocks) - 1, **fields}


def _input(arguments: str) -> Json:
    """A call's arguments as an object; an answer that was cut off may have only part of them."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def anthropic_error(body: Mapping[str, Any], status: int = 0) -> dict[str, object]:
    """``body``, in the form of `http_errors.error_body`, in the form of Anthropic's API."""
    error = body["error"]
    type_ = _ERROR_TYPES.get(error["type"], error["type"])
    said = {"type": _ERROR_TYPES_OF_STATUS.get(status, type_), "message": error["message"]}
    return {"type": "error", "error": said}
