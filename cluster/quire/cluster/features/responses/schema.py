"""The body of OpenAI's ``/v1/responses``, with the fields that are served. Nothing is stored."""

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from quire.cluster.dialects.tools import ToolUse, check_tool_use
from quire.cluster.edge.openai_schema import NOWHERE, ChatFields, Effort, GenerationBody
from quire.cluster.edge.served_fields import Body
from quire.cluster.features.responses.input import Input, turns_of
from quire.cluster.features.responses.tools import (
    echoed_tools,
    ignored_parts,
    is_hosted,
    nested_choice,
    nested_tool,
)
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prompt
from quire.worker.request.sampling_params import SamplingParams

_MAX_METADATA = 16
_MAX_METADATA_CHARS = (64, 512)


class TextFields(Body):
    unserved = frozenset({"verbosity"})

    format: dict[str, Any] | None = None


class ReasoningFields(Body):
    accepted = frozenset({"summary", "generate_summary"})

    effort: Effort | None = None


class ResponsesBody(ChatFields, GenerationBody):
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NOWHERE,
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        # Reasoning is returned as plain text, and clients can send it back as such.
        "include": ([], ["reasoning.encrypted_content"]),
        "truncation": ("disabled", "auto"),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
        "moderation": (),
        "prompt": (),
        # Fields of the other endpoints.
        "n": (1,),
        "max_tokens": (),
        "prompt_logprobs": (),
        "logprob_token_ids": (),
        "return_token_ids": (False,),
        "response_format": (),
        "reasoning_effort": (),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "previous_response_id": "responses are not kept, send the earlier items in input",
        "conversation": "conversations are not kept, send the earlier items in input",
        "background": "responses are not kept, wait for the answer or stream it",
        "max_tokens": "send max_output_tokens",
        "response_format": "send text={'format': …}",
        "reasoning_effort": "send reasoning={'effort': …}",
    }
    parts: ClassVar[Mapping[str, type[Body]]] = {"text": TextFields, "reasoning": ReasoningFields}

    accepted = GenerationBody.accepted | {"max_tool_calls"}  # A limit of OpenAI's own tools.

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @property
    def ignored(self) -> Sequence[str]:
        return [*super().ignored, *ignored_parts(self.tools or ())]

    def check(self) -> None:
        super().check()
        most_key, most_value = _MAX_METADATA_CHARS
        metadata = self.metadata or {}
        if len(metadata) > _MAX_METADATA or any(
            len(key) > most_key or len(value) > most_value for key, value in metadata.items()
        ):
            raise InvalidRequest(
                f"metadata={reprlib.repr(metadata)}: at most {_MAX_METADATA} keys of at most "
                f"{most_key} characters, with values of at most {most_value}",
                param="metadata",
            )

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    @property
    def forms(self) -> dict[str, Any]:
        return super().forms | {"text.format": self.text.format if self.text else None}

    @cached_property
    def tool_use(self) -> ToolUse:
        tools = [
            nested_tool(f"tools[{index}]", tool)
            for index, tool in enumerate(self.tools or ())
            if not is_hosted(tool)
        ]
        choice = nested_choice(self.tool_choice)
        return check_tool_use(tools, choice, is_parallel=self.parallel_tool_calls is not False)

    def prompts(self) -> list[Prompt]:
        return [(self.chat(turns_of(self.instructions, self.input)),)]

    def params(self) -> SamplingParams:
        return self._params(max_tokens=self.max_output_tokens)

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that the answer repeats."""
        params = self.params()
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tools": echoed_tools(self.tools or ()),
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": (self.text and self.text.format) or {"type": "text"}},
            "reasoning": {"effort": self.effort, "summary": None},
            "metadata": self.metadata or {},
            "user": self.user,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "service_tier": "default",
            "top_logprobs": 0,
            "truncation": "disabled",
        }
