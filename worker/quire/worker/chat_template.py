"""A checkpoint's chat template: messages to the text that the model was trained on.

Renders what transformers renders. Apart from `quire.worker.text`, as importing Jinja takes longer
than loading a small model's weights, and plain completions need none.
"""

import json
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from quire.worker.errors import CheckpointError, InvalidRequest
from quire.worker.text import Message


class ChatTemplate:
    """A template that knows the model's special tokens by their names.

    Raises:
        CheckpointError: It is no Jinja template.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self._template = _compile(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The text of a chat. What OpenAI's clients send as several parts of text is one text.

        Raises:
            InvalidRequest: The template refuses the messages, or they are none.
        """
        plain = [_plain(message) for message in messages]
        try:
            return self._template.render(
                messages=plain,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}") from error


def _plain(message: Message) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(
            f"messages: must be mappings with role and content, not {reprlib.repr(message)}"
        )
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


def _compile(source: str) -> jinja2.Template:
    # The settings and helpers that chat templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template cannot be read: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
