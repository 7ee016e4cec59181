"""The bodies of Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from quire.cluster.dialects.tools import ToolUse, check_tool_use
from quire.cluster.edge.openai_schema import NOWHERE, ChatFields, GenerationBody, Texts
from quire.cluster.edge.served_fields import Body
from quire.cluster.features.anthropic.input import Blocks, Turns, marks_of, turns_of
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prompt
from quire.worker.request.sampling_params import SamplingParams

_TOOL_FIELDS = {
    "name": "name",
    "description": "description",
    "input_schema": "parameters",
    "strict": "strict",
}
_TOOL_HINTS = ("type", "cache_control", "eager_input_streaming")
_HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset")
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_FIELDS = ("type", "name", "disable_parallel_tool_use")


class ThinkingFields(Body):
    """``adaptive`` leaves thinking to the model, like a missing field. ``budget_tokens`` is a hint;
    ``max_tokens`` is the limit."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFields(Body):
    format: dict[str, Any] | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class MessagesFields(ChatFields):
    """The fields that determine the prompt."""

    # The client keeps its context itself.
    unserved = frozenset({"context_management"})
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        # Fields of the other endpoints.
        "reasoning_effort": (),
        "parallel_tool_calls": (),
        "add_generation_prompt": (),
        "continue_final_message": (),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        "reasoning_effort": "send thinking",
        "parallel_tool_calls": "send tool_choice with disable_parallel_tool_use",
        "continue_final_message": "end messages with one of the assistant, which is continued",
    }

    parts: ClassVar[Mapping[str, type[Body]]] = {
        "thinking": ThinkingFields,
        "output_config": OutputFields,
    }

    model: str | None = None
    messages: Turns
    system: Blocks | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputFields | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def effort(self) -> str | None:
        if self.thinking is not None and self.thinking.type == "disabled":
            return "none"
        effort = self.output_config.effort if self.output_config is not None else None
        return "xhigh" if effort == "max" else effort

    @property
    def ignored(self) -> Sequence[str]:
        tools = enumerate(self.tools or ())
        return [*super().ignored, *(f"tools[{index}]" for index, each in tools if _is_hosted(each))]

    def _template_kwargs(self) -> dict[str, Any]:
        is_enabled = self.thinking is not None and self.thinking.type == "enabled"
        return ({"enable_thinking": True} if is_enabled else {}) | super()._template_kwargs()

    @cached_property
    def tool_use(self) -> ToolUse:
        tools = [
            _tool(f"tools[{index}]", tool)
            for index, tool in enumerate(self.tools or ())
            if not _is_hosted(tool)
        ]
        choice, is_parallel = _choice(self.tool_choice)
        return check_tool_use(tools, choice, is_parallel=is_parallel)

    def spans(self) -> Prompt:
        """One prompt that holds all messages. A last assistant message is the answer's prefill."""
        turns = turns_of(self.system or (), self.messages)
        goes_on = turns[-1].role == "assistant"
        chat = self.chat(turns)
        return (replace(chat, add_generation_prompt=not goes_on, continue_final_message=goes_on),)


class CountTokensBody(MessagesFields):
    pass


class MessagesBody(MessagesFields, GenerationBody):
    accepted = GenerationBody.accepted | MessagesFields.accepted
    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **NOWHERE,
        **MessagesFields.neutral,
        "service_tier": ("auto", "standard_only"),
        "stop": (),
        "n": (1,),
        "stream_options": (),
        "prompt_logprobs": (),
        "logprob_token_ids": (),
        "prompt_cache_retention": (),
        "return_token_ids": (False,),
    }
    remedies: ClassVar[Mapping[str, str]] = {
        **MessagesFields.remedies,
        "stop": "send stop_sequences",
        "prompt_cache_retention": "send cache_control with a ttl",
        "stream_options": "streams always have the usage",
    }

    max_tokens: int
    stop_sequences: Texts | None = None

    @property
    def keep_s(self) -> float:
        """The longest time, in seconds, of the ``cache_control`` marks. All of the prompt is kept
        that long, not only the part before the mark."""
        marks: list[tuple[str, object]] = [("cache_control", self.cache_control)]
        marks += [
            (f"tools[{index}].cache_control", tool.get("cache_control"))
            for index, tool in enumerate(self.tools or ())
            if isinstance(tool, dict)
        ]
        marks += marks_of(self.system or (), self.messages)
        return max(_mark_s(place, mark) for place, mark in marks)

    @property
    def forms(self) -> dict[str, Any]:
        form = self.output_config.format if self.output_config is not None else None
        return super().forms | {"output_config.format": form}

    def prompts(self) -> list[Prompt]:
        return [self.spans()]

    def params(self) -> SamplingParams:
        return self._params(max_tokens=self.max_tokens, stop=self.stop_sequences)


def _mark_s(place: str, mark: object) -> float:
    """How long a ``cache_control`` mark keeps its prefix, in seconds. Raises InvalidRequest."""
    if mark is None:
        return 0.0
    if isinstance(mark, dict) and mark.get("type") == "ephemeral":
        seconds = _TTL_S.get(str(mark.get("ttl") or "5m"))
        if seconds is not None:
            return seconds
    raise InvalidRequest(
        f"{place}={reprlib.repr(mark)}: must be of type 'ephemeral', with a ttl of "
        f"{' or '.join(map(repr, _TTL_S))} or none",
        param=place,
    )


def _is_hosted(tool: object) -> bool:
    """Whether a tool runs on Anthropic's servers. The model does not see it."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(_HOSTED)


def _tool(place: str, tool: object) -> object:
    """``tool`` in the form of chats. Raises InvalidRequest if it is not a client's own tool."""
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{place}={reprlib.repr(tool)}: must be an object", param=place)
    if tool.get("type") not in (None, "custom"):
        raise InvalidRequest(
            f"{place}: type={reprlib.repr(tool['type'])} is not supported, the model does not know "
            "the tool: send it with a description and an input_schema",
            param=place,
        )
    for name, value in tool.items():
        if name not in (*_TOOL_FIELDS, *_TOOL_HINTS) and value not in (None, False, []):
            shown = f"{name[:64]}={reprlib.repr(value)}"
            raise InvalidRequest(f"{place}: {shown} is not supported: leave it out", param=place)
    if not isinstance(tool.get("input_schema"), dict):
        shown = reprlib.repr(tool.get("input_schema"))
        raise InvalidRequest(
            f"{place}: input_schema={shown}: must be a JSON schema, an object", param=place
        )
    function = {ours: tool[theirs] for theirs, ours in _TOOL_FIELDS.items() if theirs in tool}
    return {"type": "function", "function": function}


def _choice(given: object) -> tuple[object, bool]:
    """The tool choice in the form of chats, and whether several calls are allowed."""
    if given is None:
        return None, True
    kind = given.get("type") if isinstance(given, dict) else None
    has_name = isinstance(given, dict) and isinstance(given.get("name"), str)
    if not isinstance(given, dict) or (kind not in _CHOICES and (kind != "tool" or not has_name)):
        raise InvalidRequest(
            f"tool_choice={reprlib.repr(given)}: must be an object of type 'auto', 'any', 'none', "
            "or 'tool' with a name",
            param="tool_choice",
        )
    single = given.get("disable_parallel_tool_use") or False
    unknown = next((name for name in given if name not in _CHOICE_FIELDS), None)
    if unknown is not None or not isinstance(single, bool):
        raise InvalidRequest(
            f"tool_choice={reprlib.repr(given)}: has the fields type, name and "
            "disable_parallel_tool_use, which is true or false",
            param="tool_choice",
        )
    choice = {"type": "function", "function": {"name": given["name"]}} if kind == "tool" else None
    return choice or _CHOICES[str(kind)], not single
