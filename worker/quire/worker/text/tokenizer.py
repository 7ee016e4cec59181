"""Text to token ids and back: tokenizer and chat template.

Built on the `tokenizers` library and Jinja alone, so that a gateway needs neither torch nor the
seconds that importing transformers takes.

Anyone may have written a tokenizer's file, and so its work is bounded. Where every part is known to
take the square of a text's length at most (`quire.worker.text.tokenizer_work`), texts are encoded
in this process: what else limits texts limits that. Otherwise a process of its own encodes, with
limits of time and memory. A decoder of which that is not known is refused. What the library raises
or panics with is an InvalidRequest.
"""

import io
import json
import reprlib
import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.worker.api.errors import CheckpointError, InvalidRequest
from quire.worker.model.checkpoint import read_json
from quire.worker.model.hub import model_name
from quire.worker.text.bounds import TextBound, text_bound
from quire.worker.text.tokenizer_process import TokenizerProcess
from quire.worker.text.tokenizer_work import decodes_in_bounds, encodes_in_bounds

if TYPE_CHECKING:
    from quire.worker.text.chat_template import ChatTemplate

Message = Mapping[str, Any]
"""One turn of a chat: ``{"role": …, "content": …}``."""

_MANY_TOKENS = 4_000


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in a byte-level vocabulary: GPT-2's.

    A byte that can be printed stands for itself, the others for the characters from 256 on.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printed)
    return {chr(byte): byte for byte in printed} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        tools_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        response_template: object = None,
        name: str = "the model",
    ) -> None:
        """``name`` is the model's, for messages.

        Raises:
            CheckpointError: The work of decoding has no known bound.
        """
        if not decodes_in_bounds(backend):
            raise CheckpointError(
                f"{name}: the decoder of tokenizer.json may make much of a token or take "
                "exponential time: without it, prompts and answers are token ids"
            )
        self._backend = backend
        self._name = name
        self._process: TokenizerProcess | None = None
        if not encodes_in_bounds(backend):
            self._process = TokenizerProcess(backend.to_str, name=name)
        self._special_tokens = dict(special_tokens or {})
        self._template = _chat_template(chat_template, tools_template, self._special_tokens)
        self._is_byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._token_bytes: dict[int, bytes] = {}
        self.bound: TextBound | None = text_bound(backend) if self.encodes_here else None
        """How few tokens a text can have, by its length alone; ``None`` where that is not known."""
        self.response_template = response_template
        """As the checkpoint has it, unchecked; ``None`` where it has none."""

    @classmethod
    def load(cls, path: str | Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and the files of chat templates.

        ``chat_template`` is a Jinja template to use instead of the checkpoint's own.

        Raises:
            CheckpointError: A file is missing or cannot be read; the message names it.
        """
        folder = Path(path)
        config = _json_of(folder / "tokenizer_config.json")
        templates = {} if chat_template is not None else _named_templates(folder, config)
        tokens = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token")
        }
        special = {name: value for name, value in tokens.items() if isinstance(value, str)}
        return cls(
            _load_backend(folder),
            chat_template=chat_template or templates.get("default"),
            tools_template=templates.get("tool_use"),
            special_tokens=special,
            response_template=config.get("response_template"),
            name=model_name(folder),
        )

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def template(self) -> "ChatTemplate | None":
        """The template of `render_chat`, for callers that render elsewhere."""
        return self._template

    def token_id(self, text: str) -> int | None:
        """The token that is this text; ``None`` where there is none."""
        return self._backend.token_to_id(text)

    def as_zip(self) -> bytes:
        """A ZIP archive of the files that `load` reads."""
        config: dict[str, object] = dict(self._special_tokens)
        if self._template is not None:
            named = {"default": self._template.source, "tool_use": self._template.tools_source}
            config["chat_template"] = [
                {"name": name, "template": source} for name, source in named.items() if source
            ]
        if self.response_template is not None:
            config["response_template"] = self.response_template
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
            for name, text in (
                ("tokenizer.json", self._backend.to_str()),
                ("tokenizer_config.json", json.dumps(config)),
            ):  # A ZipInfo has no time, so that the bytes are always the same.
                files.writestr(zipfile.ZipInfo(name), text, compress_type=zipfile.ZIP_DEFLATED)
        return archive.getvalue()

    def special_tokens(self) -> dict[int, str]:
        """The texts of the tokens that `decode` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @property
    def encodes_here(self) -> bool:
        """Whether `encode` takes no more than the text's length allows; else a process does it,
        which may take seconds."""
        return self._process is None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids. Other threads run meanwhile.

        Raises:
            InvalidRequest: The tokenizer refuses the text, or exceeds a limit over it.
        """
        if self._process is not None:
            return self._process.encode(text, add_special_tokens=add_special_tokens)
        return encode(self._backend, text, add_special_tokens=add_special_tokens, name=self._name)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``. Other threads run meanwhile where there are many."""
        ids = list(token_ids)
        if len(ids) < _MANY_TOKENS:
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        # As in `encode`: a million tokens held a gateway up for 0.23 s.
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def to_json(self) -> str:
        """The contents of a ``tokenizer.json``, without the chat template."""
        return self._backend.to_str()

    def token_text(self, token_id: int) -> str:
        """One token's own text, for the log-probabilities that an API shows."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `decode` leaves out."""
        return frozenset(self.special_tokens())

    @property
    def is_byte_level(self) -> bool:
        """Whether a text is the UTF-8 of its tokens' bytes, one token behind the other."""
        return self._is_byte_level

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; only where `is_byte_level`. Unknown ids add nothing."""
        told = self._token_bytes.get(token_id)
        if told is None:
            spelled = self._backend.id_to_token(token_id) or ""
            try:
                told = bytes(_BYTES[character] for character in spelled)
            except KeyError:  # An added token, which is spelled as it is.
                told = spelled.encode()
            self._token_bytes[token_id] = told
        return told

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a chat, up to where the assistant's next turn begins.

        ``options`` are those of `ChatTemplate.render`.

        Raises:
            InvalidRequest: The model has no chat template, or its template refuses the messages.
        """
        text = self.render_chat(messages, **options)
        return self.encode(text, add_special_tokens=False)  # The template wrote them.

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a chat, special tokens written out; as `apply_chat_template` raises."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template: send a plain prompt, or add a "
                "chat_template.jinja to its directory"
            )
        if not messages:
            raise InvalidRequest("messages is empty: at least one message")
        return self._template.render(messages, **options)


def encode(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, name: str
) -> list[int]:
    """As `Tokenizer.encode`, in this process whatever it takes."""
    try:
        # `encode` would keep other threads from running: 2 MB of text held a gateway up for 4 s, in
        # a thread or not. This one does not, and is faster, since it notes no places in the text.
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise InvalidRequest(
            f"the tokenizer of {name} cannot encode the text: {error}: send another text, or token "
            "ids"
        ) from None
    return encoded.ids


def _is_of_library(error: BaseException) -> bool:
    """It raises no narrower type than Exception, and where it panics a BaseException."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
        # As transformers, which does neither unless it is asked to.
        backend.no_padding()
        backend.no_truncation()
        return backend
    if not (folder / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{folder}: has neither tokenizer.json nor tokenizer.model; is it a Hugging Face "
            "checkpoint?"
        )
    # Older checkpoints: transformers knows how to convert them, once, in seconds.
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(folder, use_fast=True)
    backend = converted.backend_tokenizer
    return backend


def _json_of(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _named_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's chat templates by name; "default" is that of chats without tools. Files
    of templates come before what the configuration has."""
    settings, found = folder / "tokenizer_config.json", config.get("chat_template")
    if found is None:  # Where older processors have theirs.
        settings = folder / "chat_template.json"
        found = _json_of(settings).get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates = {}
    for entry in named:
        name, source = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if isinstance(name, str) and isinstance(source, str):
            templates[name] = source
        elif found is not None:
            raise CheckpointError(
                f"{settings}: chat_template={reprlib.repr(found)} must "
                "be a Jinja template, or a list of objects with name and template"
            )
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name, file in [("default", folder / "chat_template.jinja"), *((f.stem, f) for f in more)]:
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file} cannot be read as text: {error}") from error
    return templates


def _chat_template(
    source: str | None, tools_source: str | None, special_tokens: Mapping[str, str]
) -> "ChatTemplate | None":
    if not source:
        return None
    from quire.worker.text.chat_template import ChatTemplate  # Its Jinja is slow to import.

    try:
        return ChatTemplate(source, special_tokens=special_tokens, tools_source=tools_source)
    except RecursionError as error:
        raise CheckpointError("the chat template is nested too deeply to be read") from error
