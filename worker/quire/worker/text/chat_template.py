"""A checkpoint's chat template: messages to the text that the model was trained on.

Renders what transformers renders. Apart from `quire.worker.text.tokenizer`, as importing Jinja
takes longer than loading a small model's weights, and plain completions need none."""

import json
import re
import reprlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from quire.worker.api.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:  # The process that renders for a gateway needs no tokenizer.
    from quire.worker.text.tokenizer import Message

_MAX_REASON_CHARS = 500
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatTemplate:
    """A checkpoint's template. It knows the model's special tokens by their names.

    ``tools_source`` renders chats with tools, where a checkpoint has a template of its own for
    them (named ``tool_use``).

    Raises:
        CheckpointError: One of them is no Jinja template.
    """

    def __init__(
        self, source: str, *, special_tokens: Mapping[str, str], tools_source: str | None = None
    ) -> None:
        self.source = source
        self.tools_source = tools_source
        self.special_tokens = dict(special_tokens)
        self._plain = _OneTemplate(source, self.special_tokens)
        self._with_tools = (
            self._plain if tools_source is None else _OneTemplate(tools_source, self.special_tokens)
        )

    @property
    def text(self) -> str:
        """All that the checkpoint shows of its formats."""
        return self.source + (self.tools_source or "")

    def render(
        self,
        messages: "Sequence[Message]",
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat.

        Messages are as in OpenAI's API, older forms included. The template gets what it can read:
        several parts of text as one text, the arguments of a call as an object, a result of a
        function as that of a tool, a ``developer`` it does not know as ``system``, and a missing
        content in the form in which it is not shown.

        ``tools`` are those that the model may call, as in OpenAI's API; ``template_kwargs`` are
        more variables, such as ``enable_thinking``. With ``continue_final_message`` the text ends
        where the last message's does.

        Takes as long and as much memory as the template makes it: `TemplateProcess` has limits.

        Raises:
            InvalidRequest: The template refuses the messages or fails on them, or they are none.
        """
        template = self._with_tools if tools else self._plain
        plain = template.readable(_plain(messages))
        variables = dict(template_kwargs or {})
        for name in _RESERVED & (self.special_tokens | variables).keys():
            raise InvalidRequest(
                f"chat_template_kwargs={{{name!r}: …}}: the name is taken",
                param="chat_template_kwargs",
            )
        variables |= {"messages": plain, "add_generation_prompt": add_generation_prompt}
        # None where there are none, as in transformers: templates ask for both.
        variables["tools"] = list(tools) if tools else None
        if not continue_final_message:
            return template.render(variables)
        variables["continue_final_message"] = True
        variables["add_generation_prompt"] = False
        return _up_to_the_end_of_the_last(plain, lambda: template.render(variables))


class _OneTemplate:
    """A compiled template, and what it can read."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source)
        self._special_tokens = special_tokens

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequest: the template refuses the messages or fails on them."""
        try:
            return self._template.render({**self._special_tokens, **variables})
        except Exception as error:  # A template is a program: it may divide by zero.
            reason = _reason(error)
            raise InvalidRequest(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error

    def readable(self, messages: "Sequence[Message]") -> "list[Message]":
        """The messages, in the forms that this template reads."""
        return [self._readable(message) for message in messages]

    def _readable(self, message: "Message") -> "Message":
        if message.get("role") == "developer" and not self._shows_developer:
            message = {**message, "role": "system"}
        if message.get("content") is not None or not message.get("tool_calls"):
            return message
        rest = {name: value for name, value in message.items() if name != "content"}
        return {**rest, **self._no_content}

    @cached_property
    def _shows_developer(self) -> bool:
        return _PROBE in self._probe({"role": "developer", "content": _PROBE}, _USER)

    @cached_property
    def _no_content(self) -> "Message":
        """The content of a message that has calls and no text. Some templates ask whether it is
        None, others add it to a text, or write whatever is there: it is the first form that is
        not refused, with which the call is shown, and with the fewest None."""
        function = {"name": _PROBE, "arguments": _Arguments("{}", {})}
        calls = [{**_CALL, "function": function}]
        call: Message = {"role": "assistant", "tool_calls": calls}
        result = {"role": "tool", "tool_call_id": _CALL["id"], "content": "?"}
        forms: list[Message] = [{"content": None}, {}, {"content": ""}]
        texts = [self._probe(_USER, {**call, **form}, result, tools=[_TOOL]) for form in forms]
        faults = [
            (not text, _PROBE not in text, len(re.findall("None|null", text))) for text in texts
        ]
        return forms[faults.index(min(faults))]

    def _probe(self, *messages: "Message", tools: Sequence[Any] | None = None) -> str:
        try:
            return self.render(
                {"messages": messages, "tools": tools, "add_generation_prompt": False}
            )
        except InvalidRequest:
            return ""


_PROBE = "quireprobe"
_USER = {"role": "user", "content": "?"}
_CALL = {"type": "function", "id": "probe0000"}  # Mistral's templates want nine characters.
_PARAMETERS = {"type": "object", "properties": {"p": {"type": "string", "description": "?"}}}
_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "?", "parameters": {**_PARAMETERS, "required": ["p"]}},
}


def _up_to_the_end_of_the_last(messages: "list[Message]", render: Callable[[], str]) -> str:
    """A rendering of ``messages``, to the end of the last one's content. A mark behind the content
    shows where that is: the content itself may stand elsewhere in the text, too."""
    last = messages[-1]
    content = last.get("content")
    mark = f"quire{secrets.token_hex(8)}"
    # Behind the mark is space that no template writes, to see whether it keeps the content's.
    shown = "" if not isinstance(content, str) or not content.strip() else content + mark + _SPACE
    messages[-1] = {**last, "content": shown}
    before, *behind = render().split(mark) if shown else [""]
    if len(behind) != 1:
        raise InvalidRequest(
            "continue_final_message=True: the last message has no text that the chat template "
            "shows as it is: send one with content",
            param="continue_final_message",
        )
    return before if behind[0].startswith(_SPACE) else before.rstrip()


_SPACE = " \t \t"


def _reason(error: Exception) -> str:
    """The error message for the sender of the messages, or the author of the template."""
    reason = str(error)
    if not isinstance(error, jinja2.TemplateError | TypeError):
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}…"


def _plain(messages: "Sequence[Message]") -> "list[Message]":
    """The messages in OpenAI's present form, with one text each."""
    plain: list[Message] = []
    ids: dict[object, str] = {}
    for place, message in enumerate([messages] if isinstance(messages, str) else messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InvalidRequest(
                f"messages: must be mappings with role and content, not {reprlib.repr(message)}",
                param="messages",
            )
        fields = {name: value for name, value in message.items() if value is not None}
        call = fields.pop("function_call", None)
        if isinstance(call, Mapping) and not fields.get("tool_calls"):
            ids[call.get("name")] = f"call{place:05}"
            fields["tool_calls"] = [
                {"type": "function", "id": ids[call.get("name")], "function": call}
            ]
        if fields.get("role") == "function":
            fields["role"] = "tool"
            fields.setdefault("tool_call_id", ids.get(fields.get("name"), f"call{place:05}"))
        if isinstance(fields.get("tool_calls"), list):
            fields["tool_calls"] = [_readable(call) for call in fields["tool_calls"]]
        content = fields.get("content")
        if isinstance(content, list):
            fields["content"] = "".join(_texts(content))
        elif content is None and not fields.get("tool_calls"):
            fields["content"] = ""
        plain.append(fields)
    return plain


def _texts(content: Sequence[object]) -> Iterator[str]:
    for part in content:
        fields = part if isinstance(part, Mapping) else {"type": part}
        kind, text = fields.get("type"), fields.get("text")
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"messages: a content part of type {reprlib.repr(kind)} is not supported: this "
                "model reads text, send parts of type 'text'",
                param="messages",
            )
        yield text


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
    """A call whose arguments are an object. Text that is none, as of a call that was cut, is the
    one argument of that object: a template that goes through arguments could not read it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), Mapping):
        return call
    text = function.get("arguments") or "{}"  # Some clients write no arguments like that.
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        value = text
    if not isinstance(value, dict):
        value = {"arguments": text}
    return {**call, "function": {**function, "arguments": _Arguments(text, value)}}


def _compile(source: str) -> jinja2.Template:
    # The settings and helpers that chat templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
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


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, with which templates mark what training learns from. The text inside
    is rendered like any other, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 - As the library has it.

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


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
