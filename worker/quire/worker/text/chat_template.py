"""A checkpoint's chat template: messages to the text that the model was trained on.

Renders what transformers renders. Apart from `quire.worker.text.tokenizer`, as importing Jinja
takes longer than loading a small model's weights, and plain completions need none."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from quire.worker.api.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:  # The process that renders for a gateway needs no tokenizer.
    from quire.worker.text.tokenizer import Message

_MAX_REASON_CHARS = 500
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatTemplate:
    """A template that knows the model's special tokens by their names.

    Raises:
        CheckpointError: It is no Jinja template.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source)
        self.source = source
        self.special_tokens = dict(special_tokens)

    def render(
        self,
        messages: "Sequence[Message]",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. What OpenAI's clients send as several parts of text is one text, and
        the arguments of a call, which they send as text, are an object.

        ``tools`` are those that the model may call, as in OpenAI's API; ``template_kwargs`` are
        more variables, such as ``enable_thinking``. With ``continue_final_message`` the text ends
        where the last message's does.

        Takes as long and as much memory as the template makes it: `TemplateProcess` has limits.

        Raises:
            InvalidRequest: The template refuses the messages or fails on them, or they are none.
        """
        plain = [_plain(message) for message in messages]
        variables = {**self.special_tokens, **(template_kwargs or {})}
        for name in _RESERVED & variables.keys():
            raise InvalidRequest(f"chat_template_kwargs={{{name!r}: …}}: the name is taken")
        variables |= {"messages": plain, "add_generation_prompt": add_generation_prompt}
        # None where there are none, as in transformers: templates ask for both.
        variables["tools"] = list(tools) if tools else None
        if continue_final_message:
            variables["continue_final_message"] = True
            variables["add_generation_prompt"] = False
        try:
            text = self._template.render(variables)
        except Exception as error:  # A template is a program: it may divide by zero.
            reason = _reason(error)
            raise InvalidRequest(f"the chat template refuses these messages: {reason}") from error
        return _up_to(plain[-1].get("content"), text) if continue_final_message else text


def _up_to(content: object, text: str) -> str:
    """``text`` to the end of its last message, whose content this is."""
    stripped = content.strip() if isinstance(content, str) else ""
    start = text.rfind(stripped)
    if not stripped or start < 0:
        raise InvalidRequest(
            "continue_final_message=True: the last message has no text that the chat template "
            "shows as it is: send one with content"
        )
    whole = str(content).lstrip()
    # A template may strip what it shows.
    return text[:start] + (whole if text.startswith(whole, start) else stripped)


def _reason(error: Exception) -> str:
    """The error message for the sender of the messages, or the author of the template."""
    reason = str(error)
    if not isinstance(error, jinja2.TemplateError | TypeError):
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}…"


def _plain(message: "Message") -> "Message":
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"messages: must be mappings with role and content, not {reprlib.repr(message)}"
        )
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message = {**message, "tool_calls": [_readable(call) for call in calls]}
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        fields = part if isinstance(part, Mapping) else {"type": part}
        kind, text = fields.get("type"), fields.get("text")
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"messages: a content part of type {reprlib.repr(kind)} is not supported: this "
                "model reads text, send parts of type 'text'"
            )
        texts.append(text)
    return {**message, "content": "".join(texts)}


class _Arguments(dict[str, Any]):
    """The arguments of a call, for templates that write an object as JSON or go through it, and
    for those that join them to other text."""

    def __init__(self, text: str, value: dict[str, Any]) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _readable(call: Any) -> Any:
    """A call whose arguments are an object, if their text is that of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"] or "{}"  # Some clients write no arguments like that.
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return call
    if not isinstance(value, dict):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(text, value)}}


def _compile(source: str) -> jinja2.Template:
    # The settings and helpers that chat templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
        optimized=False,
    )
    environment.code_generator_class = _Unfolded
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except Exception as error:  # It is compiled to Python, whose parser has limits of its own.
        raise CheckpointError(f"the chat template cannot be read: {_reason(error)}") from error


class _Unfolded(jinja2.compiler.CodeGenerator):
    """Computes nothing of a template while it is compiled, which no limit bounds: a constant
    such as ``'x' * 10**10`` would take its 10 GB in the process that only wants to know whether
    the template is one."""

    def _output_child_to_const(
        self, node: jinja2.nodes.Expr, frame: jinja2.compiler.Frame, finalize: Any
    ) -> str:
        if not isinstance(node, jinja2.nodes.TemplateData):
            raise jinja2.nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
