"""The messages of a chat in OpenAI's API."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from quire.worker.request.errors import InvalidRequest

# Validating a body blocks the gateway. 28 MB of token ids took 23 s, because validation as a text
# gave one error per id. So the first error ends the validation of a list, and lists have a maximum
# length.
MAX_ITEMS = 1024
"""Most prompts, stop strings or parts of a message."""
MANY = Field(fail_fast=True, max_length=MAX_ITEMS)


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str
    text: str | None = None


class ChatTurn(BaseModel):
    """A message. The template receives all its fields, also those that are not declared here."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Annotated[list[ContentPart], MANY] | None = None
    tool_calls: Annotated[list[dict[str, Any]], MANY] | None = None

    def message(self) -> dict[str, Any]:
        """The message for the chat template. Raises InvalidRequest if a part is not text."""
        fields = {
            name: value for name, value in (self.model_extra or {}).items() if value is not None
        }
        if self.tool_calls:
            fields["tool_calls"] = self.tool_calls
        if "reasoning" in fields:  # Answers use both names; templates know only this one.
            fields.setdefault("reasoning_content", fields["reasoning"])
        if self.tool_calls and not self.content and "reasoning_content" in fields:
            # The name in gpt-oss's template, which refuses it beside content.
            fields.setdefault("thinking", fields["reasoning_content"])
        return {"role": self.role, "content": self._text(), **fields}

    def _text(self) -> str | None:
        if self.content is None:
            return None if self.tool_calls else ""
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(
                    f"messages: a content part of type {part.type!r} is not supported: this "
                    "model reads text, send parts of type 'text'",
                    param="messages",
                )
        return "".join(part.text or "" for part in self.content)
