"""A checkpoint's chat template: renders messages to text in the format of the model's training.

It renders the same text as transformers. It is not part of `quire.worker.text.tokenizer`, because
importing Jinja takes longer than loading a small model's weights, and completions do not need it.
"""

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

from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.text.template.chat_roles import CALL_ID, PROBE, TOOL, USER, Roles

if TYPE_CHECKING:  # The process that renders for a gateway needs no tokenizer.
    from quire.worker.text.tokenizer import Message

_MAX_REASON_CHARS = 500
NO_CALLS = "the model's chat template does not show tool_calls"
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatTemplate:
    """A checkpoint's template. It can refer to the model's special tokens by name.

    ``tools_source`` renders chats with tools, if a checkpoint has a separate template for them
    (named ``tool_use``).

    Raises:
        CheckpointError: A template is not a valid Jinja template.
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
        """The sources of all templates, in which formats can be detected."""
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
        """Renders a chat to text.

        Messages are as in OpenAI's API, including older forms. They are converted to forms that the
        template can read: several text parts become one text, the arguments of a call an object, a
        function's result a tool's result, and missing content the form that is not shown. `Roles`
        brings them into an order that it shows.

        ``tools`` are the tools that the model may call, as in OpenAI's API; ``template_kwargs`` are
        more variables, such as ``enable_thinking``. With ``continue_final_message`` the text ends
        at the end of the last message's content.

        The template's use of time and memory is not limited here, but in `TemplateProcess`.

        Raises:
            InvalidRequest: The template refuses the messages, fails on them or would leave one out,
                or they are not messages.
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
        # None if there are no tools, as in transformers: templates test for either.
        variables["tools"] = list(tools) if tools else None
        if not continue_final_message:
            return template.render(variables)
        variables["continue_final_message"] = True
        variables["add_generation_prompt"] = False
        return _up_to_the_end_of_the_last(plain, lambda: template.render(variables))


class _OneTemplate:
    """A compiled template, and the forms of messages that it can read."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source)
        self._special_tokens = special_tokens
        self._roles = Roles(source, self._tried)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Renders the template. Raises InvalidRequest: it refuses the messages or fails on them."""
        try:
            return self._template.render({**self._special_tokens, **variables})
        except Exception as error:  # A template is a program: it may divide by zero.
            reason = _reason(error)
            raise InvalidRequest(
                f"the chat template refuses these messages: {reason}", param="messages"
            ) from error

    def readable(self, messages: "Sequence[Message]") -> "list[Message]":
        """The messages, converted to the forms that this template can read."""
        arranged = self._roles.arranged(messages)
        return [each for message in arranged for each in self._readable(message)]

    def _readable(self, message: "Message") -> "list[Message]":
        if not message.get("tool_calls"):
            return [message]
        texts = [text for text in self._call_texts if text is not None]
        if texts and not any(PROBE in text for text in texts):
            raise InvalidRequest(
                f"messages: {NO_CALLS}, so that they would be lost: send them as content",
                param="messages",
            )
        rest = {name: value for name, value in message.items() if name != "content"}
        if not message.get("content"):
            return [{**rest, **self._no_content}]
        if self._shows_calls_beside_content:
            return [message]
        return [
            {"role": message["role"], "content": message["content"]},
            {**rest, **self._no_content},
        ]

    @cached_property
    def _shows_calls_beside_content(self) -> bool:
        """Some templates show the calls of a message without content only."""
        text = self._with_call({"content": "?"})
        return text is None or PROBE in text

    @cached_property
    def _no_content(self) -> "Message":
        """The content for a message that has calls and no text. Some templates test it for None,
        others append it to text or print it. So this tries several forms, and takes the first one
        that is not refused, shows the call and prints the fewest None."""
        faults = [
            (not text, PROBE not in text, len(re.findall("None|null", text)))
            for text in (text or "" for text in self._call_texts)
        ]
        return _NO_CONTENT[faults.index(min(faults))]

    @cached_property
    def _call_texts(self) -> list[str | None]:
        """A chat with a call, with each form of `_NO_CONTENT`."""
        return [self._with_call(form) for form in _NO_CONTENT]

    def _with_call(self, content: "Message") -> str | None:
        """A chat with a call beside ``content``."""
        arguments = {"p": PROBE}  # Some templates show the id in place of the name.
        function = {"name": PROBE, "arguments": _Arguments(json.dumps(arguments), arguments)}
        calls = [{"type": "function", "id": CALL_ID, "function": function}]
        call: Message = {"role": "assistant", "tool_calls": calls, **content}
        result = {"role": "tool", "tool_call_id": CALL_ID, "content": "?"}
        return self._tried([USER, call, result], [TOOL])

    def _tried(self, messages: "Sequence[Message]", tools: Sequence[Any] | None) -> str | None:
        """The text of a chat; ``None`` if the template refuses it."""
        try:
            return self.render(
                {"messages": list(messages), "tools": tools, "add_generation_prompt": False}
            )
        except InvalidRequest:
            return None


_NO_CONTENT: "list[Message]" = [{"content": None}, {}, {"content": ""}]


def _up_to_the_end_of_the_last(messages: "list[Message]", render: Callable[[], str]) -> str:
    """Renders ``messages`` up to the end of the last one's content. A mark after the content shows
    where it ends, since the content itself may also occur elsewhere in the text."""
    last = messages[-1]
    content = last.get("content")
    mark = f"quire{secrets.token_hex(8)}"
    # The space after the mark is one that no template writes: it shows whether space is stripped.
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
    """The error's message, for the sender of the messages or the author of the template."""
    reason = str(error)
    if not isinstance(error, jinja2.TemplateError | TypeError):
        reason = f"{type(error).__name__}: {reason}".removesuffix(": ")
    return reason if len(reason) <= _MAX_REASON_CHARS else f"{reason[:_MAX_REASON_CHARS]}…"


def _plain(messages: "Sequence[Message]") -> "list[Message]":
    """The messages in OpenAI's current form, each with a single text."""
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
    """The arguments of a call. Templates can write this object as JSON or iterate over it, or
    concatenate it with text."""

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
    """A call whose arguments are an object. Text that is not an object, as of a truncated call,
    becomes the only argument, since a template that iterates over arguments could not read it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), Mapping):
        return call
    text = function.get("arguments") or "{}"  # Some clients send "" or null for no arguments.
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
    except Exception as error:  # Jinja compiles to Python, whose parser has its own limits.
        raise CheckpointError(f"the chat template cannot be read: {_reason(error)}") from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, with which templates mark the text used for training. The text inside
    is rendered like any other, in its own scope."""

    tags = {"generation"}  # noqa: RUF012 - As the library has it.

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Unfolded(jinja2.compiler.CodeGenerator):
    """A code generator without constant folding, since compilation has no limits: a constant such
    as ``'x' * 10**10`` would take its 10 GB in the process that only checks whether the template
    is valid."""

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
