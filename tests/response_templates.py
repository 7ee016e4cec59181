"""Response templates with the texts of their models: those that transformers ships, and one for
each other way in which a template can describe calls."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.dialects import Call
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS

KNOWN = {
    model: template for models, template in _RESPONSE_TEMPLATE_FALLBACKS.items() for model in models
}
"""Templates that transformers uses for checkpoints without one, by model type."""
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
THINK = {"open": "<think>", "close": "</think>"}
LISTED = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}


def template(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "start_anchor": "<|assistant|>",
        "fields": {"thinking": THINK, "content": {}, "tool_calls": calls, **fields},
    }


def in_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: object) -> str:
    return value if isinstance(value, str) else in_json(value)


def in_python(value: object) -> str:
    match value:
        case None | bool():
            return str(value)
        case list():
            return f"[{', '.join(map(in_python, value))}]"
        case dict():
            return f"{{{', '.join(f'{in_json(k)}: {in_python(v)}' for k, v in value.items())}}}"
        case str() if value.isalnum():
            return f"'{value}'"
    return in_json(value)


def in_braces(value: object, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(in_braces(each, quote) for each in value)}]"
        case dict():
            return f"{{{','.join(f'{k}:{in_braces(v, quote)}' for k, v in value.items())}}}"
    return in_json(value)


def in_tags(arguments: dict[str, Any], tag: str) -> str:
    return "".join(tag.format(key, as_text(value)) for key, value in arguments.items())


def keywords(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={in_python(arguments[key])}' for key in arguments)})"


Writer = Callable[[str, dict[str, Any]], str]


@dataclass(frozen=True, kw_only=True)
class Case:
    template: dict[str, Any]
    call: Writer
    calls: str = "response_template"
    """The name of the format by which Quire must parse."""
    reasoning: str = "think"
    around: tuple[str, str, str] = ("", "", "")
    """Text before, between and after calls."""
    thought: str = "<think>\n{}\n</think>\n\n"
    trims: bool = False
    """Whether the template strips whitespace from the ends of texts."""

    def write(self, reasoning: str, content: str, calls: Sequence[Call]) -> str:
        begin, between, end = self.around
        called = between.join(self.call(*call) for call in calls)
        return (
            f"{self.thought.format(reasoning) if reasoning else ''}{content}"
            f"{f'{begin}{called}{end}' if calls else ''}"
        )


class Harmony(Case):
    def write(self, reasoning: str, content: str, calls: Sequence[Call]) -> str:
        messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
        messages += [self.call(*call) for call in calls]
        if content:
            messages.append(f"<|channel|>final<|message|>{content}<|return|>")
        return "<|start|>assistant".join(messages)


CASES = {
    "hermes": Case(
        template=KNOWN["qwen3"],
        call=lambda name, arguments: (
            "\n<tool_call>\n" + in_json({"name": name, "arguments": arguments}) + "\n</tool_call>"
        ),
        calls="hermes",
    ),
    "qwen3_coder": Case(
        template=KNOWN["qwen3_5"],
        call=lambda name, arguments: (
            f"\n<tool_call>\n<function={name}>\n"
            + in_tags(arguments, "<parameter={}>\n{}\n</parameter>\n")
            + "</function>\n</tool_call>"
        ),
        calls="qwen3_coder",
        trims=True,
    ),
    "gemma4": Case(
        template=KNOWN["gemma4"],
        call=lambda name, arguments: (
            f"<|tool_call>call:{name}" + in_braces(arguments, '<|"|>') + "<tool_call|>"
        ),
        calls="gemma4",
        reasoning="gemma4",
        thought="<|channel>thought\n{}\n<channel|>",
    ),
    "glm45": Case(
        template=template(
            {
                "open_pattern": r"\s*<tool_call>(?P<name>[^\n<]+)",
                "close": "</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>[^<]+)</arg_key>\s*"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                },
                "transform": FUNCTION,
            }
        ),
        call=lambda name, arguments: (
            f"\n<tool_call>{name}\n"
            + in_tags(arguments, "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n")
            + "</tool_call>"
        ),
        calls="glm45",
    ),
    "granite": Case(
        template=template(
            {
                "open": "<|tool_call|>",
                "close": "<|/tool_call|>",
                "content": "json",
                "transform": LISTED,
                "transform_each": True,
            }
        ),
        call=lambda name, arguments: in_json({"name": name, "arguments": arguments}),
        calls="granite",
        around=("<|tool_call|>[", ", ", "]<|/tool_call|>"),
    ),
    "mistral": Case(
        template=template(
            {
                "open": "[TOOL_CALLS]",
                "content": "json",
                "transform": LISTED,
                "transform_each": True,
            }
        ),
        call=lambda name, arguments: in_json({"name": name, "arguments": arguments}),
        calls="mistral",
        around=("[TOOL_CALLS] [", ", ", "]"),
    ),
    "harmony": Harmony(
        template={
            "start_anchor": "<|start|>assistant",
            "fields": {
                "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
                "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>"},
                "tool_calls": {
                    "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>[^ <]+)"
                    r" <\|constrain\|>json<\|message\|>",
                    "close": "<|call|>",
                    "repeats": True,
                    "content": "json",
                    "transform": FUNCTION,
                },
            },
        },
        call=lambda name, arguments: (
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            + f"{in_json(arguments)}<|call|>"
        ),
        calls="harmony",
        reasoning="harmony",
    ),
    # From here on, markers that no entry of the table has.
    "python between marks": Case(
        template=template(
            {
                "open": "<|tool_call_start|>",
                "close": "<|tool_call_end|>",
                "content": "python-call-list",
                "transform": LISTED,
                "transform_each": True,
            }
        ),
        call=keywords,
        around=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    ),
    "objects in a list": Case(
        template=template(
            {
                "open": "<actions>",
                "close": "</actions>",
                "content": "json",
                "transform": {
                    "function": {"name": "{tool_name}", "arguments": "{parameters}"},
                },
                "transform_each": True,
            },
            thinking={"open": "<mull>", "close_pattern": r"</mull>\s*"},
        ),
        call=lambda name, arguments: in_json(
            {"id": 0, "tool_name": name, "parameters": arguments},
        ),
        reasoning="response_template",
        thought="<mull>{}</mull>\n",
        around=("<actions>[", ", ", "]</actions>"),
    ),
    "objects": Case(
        template=template(
            {
                "open": ["<do>", "<run>"],
                "close_pattern": r"</do>\s*",
                "repeats": True,
                "content": "json",
                "transform": {
                    "function": {"name": "{content.tool}", "arguments": "{content.args}"},
                },
            }
        ),
        call=lambda name, arguments: f"<do> {in_json({'tool': name, 'args': arguments})} </do>\n",
    ),
    "JSON behind a name": Case(
        template=template(
            {
                "open_pattern": r"<\|fn\|>\s*(?P<what>\w+)\s*<\|args\|>",
                "close_pattern": r"\s*<\|/fn\|>",
                "repeats": True,
                "content": "json",
                "content_args": {"allow_non_json": False},
                "transform": {"function": {"name": "{what}", "arguments": "{content}"}},
            }
        ),
        call=lambda name, arguments: f"<|fn|>{name}<|args|>{in_json(arguments)}<|/fn|>",
    ),
    "braces": Case(
        template=template(
            {
                "open_pattern": r"<fn>(?P<name>\w+)",
                "close": "</fn>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<q>", "<q>"]]},
                "transform": FUNCTION,
            }
        ),
        call=lambda name, arguments: f"<fn>{name}{in_braces(arguments, '<q>')}</fn>",
    ),
    "tags": Case(
        template=template(
            {
                "open_pattern": r'<invoke name="(?P<name>[^"]+)">',
                "close": "</invoke>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r'<param name="(?P<key>[^"]+)">(?P<value>[\s\S]*?)</param>'
                },
                "transform": FUNCTION,
            }
        ),
        call=lambda name, arguments: (
            f'<invoke name="{name}">\n'
            + in_tags(arguments, '<param name="{}">{}</param>\n')
            + "</invoke>"
        ),
    ),
}
