"""The body of OpenAI's ``/v1/responses``, with the fields that are served. Nothing is stored."""

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from quire.cluster.dialects.tools import ToolUse, check_tool_use
from quire.cluster.edge.openai_schema import NOWHERE, ChatFields, Effort, GenerationBody
from quire.cluster.edge.responses_input import Input, turns_of
from quire.cluster.edge.served_fields import Body
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.request import Prompt
from quire.worker.api.sampling_params import SamplingParams

_TOOL_FIELDS = ("name", "description", "parameters", "strict")
_CHOICES = ("auto", "none", "required")
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
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "max_tool_calls": (),
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

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None

    @property
    def ignored(self) -> Sequence[str]:
        tools = enumerate(self.tools or ())
        return [*super().ignored, *(f"tools[{index}]" for index, each in tools if _is_hosted(each))]

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
            _nested_tool(f"tools[{index}]", tool)
            for index, tool in enumerate(self.tools or ())
            if not _is_hosted(tool)
        ]
        choice = _nested_choice(self.tool_choice)
        return check_tool_use(tools, choice, is_parallel=self.parallel_tool_calls is not False)

    def prompts(self) -> list[Prompt]:
        return [(self.chat(turns_of(self.instructions, self.input)),)]

    def params(self) -> SamplingParams:
        return self._params(max_tokens=self.max_output_tokens)

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that the answer repeats."""
        params = self.params()
        tools = [
            {"type": "function"} | {name: tool.get(name) for name in _TOOL_FIELDS}
            for tool in self.tools or ()
            if not _is_hosted(tool)
        ]
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tools": [tool | {"strict": bool(tool["strict"])} for tool in tools],
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


def _is_hosted(tool: object) -> bool:
    """Whether a tool runs on OpenAI's servers, or is not a function tool. The model does not see
    such a tool."""
    return isinstance(tool, dict) and tool.get("type", "function") != "function"


def _nested_tool(place: str, tool: object) -> object:
    """A function ``tool`` in the form of chats; another one unchanged."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    for name, value in tool.items():
        if name not in ("type", *_TOOL_FIELDS) and value not in (None, False):
            shown = f"{name[:64]}={reprlib.repr(value)}"
            raise InvalidRequest(f"{place}: {shown} is not supported: leave it out", param=place)
    function = {name: tool[name] for name in _TOOL_FIELDS if name in tool}
    return {"type": "function", "function": function}


def _nested_choice(choice: object) -> object:
    if choice is None or choice in _CHOICES:
        return choice
    is_named = isinstance(choice, dict) and choice.get("type") == "function"
    if not is_named or not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise InvalidRequest(
            f"tool_choice={reprlib.repr(choice)}: must be 'auto', 'none', 'required' or "
            '{"type": "function", "name": …}',
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}
