"""The tools of OpenAI's Responses API, in the form of chats.

A ``custom`` tool takes one text. The model sees it as a function with the argument ``input``, and
its calls are returned as ``custom_tool_call``. Tools of OpenAI's servers are left out and named in
the answer's header; other tools that the client would run are refused, as the model would not see
them.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from quire.worker.request.errors import InvalidRequest

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_FIELDS = ("name", "description", "format")
_CHOICES = ("auto", "none", "required")
_HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def is_hosted(tool: object) -> bool:
    """Whether a tool runs on OpenAI's servers. An empty namespace counts as such."""
    if not isinstance(tool, dict):
        return False
    kind = tool.get("type")
    is_empty = kind == "namespace" and not tool.get("tools")
    return is_empty or (isinstance(kind, str) and kind.startswith(_HOSTED))


def ignored_parts(tools: Iterable[object]) -> list[str]:
    """The parts of ``tools`` that do not influence the answer."""
    ignored = []
    for index, tool in enumerate(tools):
        if is_hosted(tool):
            ignored.append(f"tools[{index}]")
        elif _is_custom(tool) and _grammar_of(tool):
            ignored.append(f"tools[{index}].format")
    return ignored


def nested_tool(place: str, tool: object) -> object:
    """``tool`` in the form of chats. Raises InvalidRequest."""
    kind = tool.get("type") if isinstance(tool, dict) else tool
    if not isinstance(tool, dict) or kind not in ("function", "custom"):
        raise InvalidRequest(
            f"{place}: type={reprlib.repr(kind)} is not supported, the model would not see the "
            "tool: send it as a function",
            param=place,
        )
    fields = _CUSTOM_FIELDS if kind == "custom" else _FUNCTION_FIELDS
    for name, value in tool.items():
        if name not in ("type", *fields) and value not in (None, False):
            shown = f"{name[:64]}={reprlib.repr(value)}"
            raise InvalidRequest(f"{place}: {shown} is not supported: leave it out", param=place)
    function = {name: tool[name] for name in _FUNCTION_FIELDS if name in tool}
    if kind == "custom":
        function["parameters"] = _INPUT
        if grammar := _grammar_of(tool):
            said = function.get("description") or ""
            function["description"] = f"{said}\n\nThe input is in this format:\n{grammar}".strip()
    return {"type": "function", "function": function}


def nested_choice(choice: object) -> object:
    """``tool_choice`` in the form of chats. Raises InvalidRequest."""
    if choice is None or choice in _CHOICES:
        return choice
    is_named = isinstance(choice, dict) and choice.get("type") in ("function", "custom")
    if not is_named or not isinstance(choice, dict) or not isinstance(choice.get("name"), str):
        raise InvalidRequest(
            f"tool_choice={reprlib.repr(choice)}: must be 'auto', 'none', 'required' or "
            '{"type": "function", "name": …}',
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def echoed_tools(tools: Iterable[object]) -> list[dict[str, Any]]:
    """The tools that are served, as the answer repeats them."""
    echoed = []
    for tool in tools:
        if _is_custom(tool):
            echoed.append({"type": "custom"} | {name: tool.get(name) for name in _CUSTOM_FIELDS})
        elif isinstance(tool, dict) and not is_hosted(tool):
            function = {name: tool.get(name) for name in _FUNCTION_FIELDS}
            echoed.append({"type": "function"} | function | {"strict": bool(function["strict"])})
    return echoed


def arguments_of(text: str) -> str:
    """The arguments of the call of a custom tool with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input in the ``arguments`` of a custom tool's call; all of them if there is none."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = found.get("input") if isinstance(found, dict) else None
    return given if isinstance(given, str) else arguments


def _is_custom(tool: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(tool, dict) and tool.get("type") == "custom"


def _grammar_of(tool: Mapping[str, Any]) -> str:
    """The grammar of a custom tool's input, which is not enforced; empty if it is any text."""
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    return grammar if isinstance(grammar, str) else ""
