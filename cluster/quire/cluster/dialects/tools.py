"""The tools that a chat offers to its model, in the form of OpenAI's API."""

import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import MAX_TOOLS

NAME_CHARS = "A-Za-z0-9_.-"
"""The characters of a tool's name, for a character class of a regular expression."""
MAX_NAME_CHARS = 128

_NAME = re.compile(f"[{NAME_CHARS}]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments; an empty one allows any."""
    is_strict: bool = False
    """Whether the arguments of calls must fit the schema."""
    spec: Mapping[str, Any]
    """The tool as the chat template receives it."""


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """A request's tools and its rules for calls."""

    tools: tuple[Tool, ...] = ()
    """The tools that may be called."""
    is_required: bool = False
    """Whether the answer must be one or more calls."""
    is_parallel: bool = True
    """Whether several calls are allowed."""

    @property
    def has_form(self) -> bool:
        """Whether the answer must have a certain form, beyond being allowed to have calls."""
        return self.is_required or any(tool.is_strict for tool in self.tools)


def check_tool_use(tools: object, choice: object, *, is_parallel: bool) -> ToolUse:
    """Parses ``tools`` and ``tool_choice`` of OpenAI's API. Raises InvalidRequest."""
    offered = check_tools(tools or [])
    if choice is None or choice == "auto":
        return ToolUse(tools=offered, is_parallel=is_parallel)
    if choice == "none":
        return ToolUse()
    if not offered:
        raise InvalidRequest("tool_choice is only allowed with tools", param="tool_choice")
    if choice == "required":
        return ToolUse(tools=offered, is_required=True, is_parallel=is_parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    if (
        not isinstance(choice, dict)
        or choice.get("type") != "function"
        or not isinstance(function, dict)
    ):
        raise InvalidRequest(
            f"tool_choice={reprlib.repr(choice)}: must be 'auto', 'none', 'required' or "
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    named = tuple(tool for tool in offered if tool.name == function.get("name"))
    if not named:
        raise InvalidRequest(
            f"tool_choice names the function {reprlib.repr(function.get('name'))}: it is not in "
            "tools",
            param="tool_choice",
        )
    # A named function means exactly one call, as in OpenAI's API.
    return ToolUse(tools=named, is_required=True, is_parallel=False)


def check_tools(given: object) -> tuple[Tool, ...]:
    """Parses the tools of a request. Raises InvalidRequest."""
    if not isinstance(given, list):
        raise InvalidRequest(f"tools={reprlib.repr(given)}: must be a list", param="tools")
    if len(given) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(given)}: at most {MAX_TOOLS}", param="tools")
    tools = tuple(_tool(f"tools[{index}]", each) for index, each in enumerate(given))
    names = [tool.name for tool in tools]
    twice = next((name for name, number in Counter(names).items() if number > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools: two have the name {twice!r}", param="tools")
    return tools


def _tool(place: str, given: object) -> Tool:
    kind = given.get("type") if isinstance(given, dict) else given
    if not isinstance(given, dict) or kind != "function":
        raise InvalidRequest(
            f"{place}: type={reprlib.repr(kind)} is not supported: functions are", param=place
        )
    function = given.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(
            f"{place}: function={reprlib.repr(function)} must be an object", param=place
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{place}: function.name={reprlib.repr(name)}: must be 1 to {MAX_NAME_CHARS} letters, "
            "digits, '_', '-' and '.'",
            param=place,
        )
    for key, kinds in (("description", str), ("parameters", dict), ("strict", bool)):
        value = function.get(key)
        if value is not None and not isinstance(value, kinds):
            raise InvalidRequest(
                f"{place}: function.{key}={reprlib.repr(value)}: {_WANTED[key]}", param=place
            )
    shown = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return Tool(
        name=name,
        parameters=function.get("parameters") or {},
        is_strict=bool(function.get("strict")),
        spec={"type": "function", "function": shown},
    )


_WANTED = {
    "description": "must be text",
    "parameters": "must be a JSON schema, an object",
    "strict": "must be true or false",
}
