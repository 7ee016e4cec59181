"""A checkpoint's tokenizer and chat template: text to token ids and back.

Uses only the `tokenizers` library and Jinja, so that a gateway needs neither torch nor the seconds
to import transformers.

A tokenizer's file is not trusted, so its work is bounded. If every part is known to take at most
quadratic time in a text's length (`quire.worker.text.tokenizer_work`), texts are encoded in this
process, where the usual limits on texts are enough. Otherwise a child process encodes, with limits
on time and memory. A decoder without a known bound is refused. Exceptions and panics of the library
are raised as InvalidRequest.
"""

import io
import json
import reprlib
import zipfile
from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from quire.worker.blocks.hashing import TokenIds
from quire.worker.model.hub import model_name
from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.text.bounds import TextBound, text_bound
from quire.worker.text.detokenizer import Detokenizer, Pieces, readable
from quire.worker.text.tokenizer_process import TokenizerProcess
from quire.worker.text.tokenizer_work import decodes_in_bounds, encodes_in_bounds
from quire.worker.weights.gguf.container import find_gguf, read_header
from quire.worker.weights.gguf.vocabulary import build_tokenizer, tokenizer_config
from quire.worker.weights.modules_file import transformer_folder
from quire.worker.weights.tokenizer_config import (
    CONFIG_FILE,
    TEMPLATES_FOLDER,
    chat_templates,
    named_tokens,
    read_config,
    vocab_size,
    with_added_tokens,
)

if TYPE_CHECKING:
    from quire.worker.text.template.chat_template import ChatTemplate

Message = Mapping[str, Any]
"""One turn of a chat: ``{"role": …, "content": …}``."""

_OLDER = (("tokenizer.model",), ("tekken.json",), ("vocab.json", "merges.txt"), ("vocab.txt",))
"""The files of tokenizers without a ``tokenizer.json``, which transformers converts."""
_MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_MANY_TOKENS = 4_000
_REPLACEMENT = "\ufffd"


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
        """``name`` is the model's name, for messages.

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
        self._pieces = Pieces(backend)
        self.bound: TextBound | None = text_bound(backend) if self.encodes_here else None
        """Lower bound on a text's number of tokens from its length; ``None`` if it is not known."""
        self.response_template = response_template
        """The checkpoint's response template, unchecked; ``None`` if it has none."""

    @classmethod
    def load(cls, path: str | Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Reads ``tokenizer.json``, or the files of an older tokenizer, ``tokenizer_config.json``
        and the files of chat templates, or the metadata of the GGUF file at ``path``.

        ``chat_template`` is a Jinja template to use instead of the checkpoint's own.

        Raises:
            CheckpointError: A file is missing or cannot be read; the message names it.
        """
        folder = Path(path)
        if (gguf := find_gguf(folder)) is not None:
            folder, header = gguf, read_header(gguf)  # Other files in its folder are not read.
            config, backend = tokenizer_config(header), build_tokenizer(header)
            names: Mapping[str, str] = named_tokens(config)
        else:
            folder = transformer_folder(folder)
            config = read_config(folder)
            backend, names = _load_backend(folder, config)
        templates = {} if chat_template is not None else chat_templates(folder, config)
        try:
            return cls(
                backend,
                chat_template=chat_template or templates.get("default"),
                tools_template=templates.get("tool_use"),
                special_tokens=names,
                response_template=config.get("response_template"),
                name=model_name(folder),
            )
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    @staticmethod
    def is_in(path: Path) -> bool:
        """Whether the checkpoint has a tokenizer. Raises CheckpointError if it cannot be read."""
        if (gguf := find_gguf(path)) is not None:
            return "tokenizer.ggml.tokens" in read_header(gguf).metadata
        folder = transformer_folder(path)
        return any(_has(folder, files) for files in (("tokenizer.json",), *_OLDER))

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def template(self) -> "ChatTemplate | None":
        """The template of `render_chat`, for callers that render elsewhere."""
        return self._template

    def token_id(self, text: str) -> int | None:
        """The id of the token with exactly this text; ``None`` if there is none."""
        return self._backend.token_to_id(text)

    @cached_property
    def around_pair(self) -> tuple[list[int], list[int], list[int]]:
        """The special tokens before, between and after two texts that are encoded as a pair."""
        encoding = self._backend.encode("a", "a")
        ids, text_of = encoding.ids, encoding.sequence_ids
        first, second = text_of.index(0), text_of.index(1)
        between, behind = (len(ids) - text_of[::-1].index(text) for text in (0, 1))
        return ids[:first], ids[between:second], ids[behind:]

    def as_zip(self) -> bytes:
        """A ZIP archive of the files that `load` reads."""
        config: dict[str, object] = dict(self._special_tokens)
        if self._template is not None:
            config["chat_template"] = self._template.source
        if self.response_template is not None:
            config["response_template"] = self.response_template
        texts = {
            "tokenizer.json": self._backend.to_str(),
            "tokenizer_config.json": json.dumps(config),
        }
        if self._template is not None and self._template.tools_source is not None:
            # Not as a list in the configuration, which not every program can read.
            texts[f"{TEMPLATES_FOLDER}/tool_use.jinja"] = self._template.tools_source
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
            for (
                name,
                text,
            ) in texts.items():  # A ZipInfo without a time makes the bytes reproducible.
                files.writestr(zipfile.ZipInfo(name), text, compress_type=zipfile.ZIP_DEFLATED)
        return archive.getvalue()

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The texts of the special tokens, which `decode` leaves out, by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @property
    def encodes_here(self) -> bool:
        """Whether the text's length bounds the work of `encode`. If not, a child process encodes,
        which may take seconds."""
        return self._process is None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids. Releases the GIL.

        Raises:
            InvalidRequest: The tokenizer refuses the text, or exceeds a limit on it.
        """
        if self._process is not None:
            return self._process.encode(text, add_special_tokens=add_special_tokens)
        return encode(self._backend, text, add_special_tokens=add_special_tokens, name=self._name)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``, as a `Detokenizer` gives it. Releases the GIL if there are
        many tokens."""
        ids = list(token_ids)
        if len(ids) < _MANY_TOKENS:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        else:  # As in `encode`: a million tokens blocked a gateway for 0.23 s.
            (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        if _REPLACEMENT not in text or not self._pieces.has_byte_fallback:
            return str(text)
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: Set[int] = frozenset(),
        follows: Sequence[int] | TokenIds = (),
    ) -> Detokenizer:
        """A detokenizer for one text. ``shown_token_ids`` are special tokens that appear in the
        text although others do not. ``follows`` are the tokens before the text."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        if shown_token_ids:
            skipped -= shown_token_ids
        return Detokenizer(self._pieces, skipped=skipped, follows=follows)

    def to_json(self) -> str:
        """The contents of ``tokenizer.json``, without the chat template."""
        return self._backend.to_str()

    def token_text(self, token_id: int) -> str:
        """The text of one token after others, or its bytes if they are not valid UTF-8."""
        return readable(self._pieces.later[token_id])

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of the special tokens, which `decode` leaves out."""
        return frozenset(self.special_tokens)

    def apply_chat_template(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a chat, by default up to the beginning of the assistant's next turn.

        ``options`` are those of `ChatTemplate.render`.

        Raises:
            InvalidRequest: The model has no chat template, or its template refuses the messages.
        """
        text = self.render_chat(messages, **options)
        return self.encode(text, add_special_tokens=False)  # The template has written them.

    def render_chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The text of a chat, including special tokens. Raises like `apply_chat_template`."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template: send a plain prompt, or add a "
                "chat_template.jinja to its directory",
                param="messages",
            )
        if not messages:
            raise InvalidRequest("messages is empty: at least one message", param="messages")
        return self._template.render(messages, **options)


def encode(
    backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool, name: str
) -> list[int]:
    """Encodes like `Tokenizer.encode`, but always in this process and without limits."""
    try:
        # The library's `encode` holds the GIL: 2 MB of text blocked a gateway for 4 s, even in a
        # thread. `encode_batch_fast` releases it, and is faster, since it computes no offsets.
        (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not _is_of_library(error):
            raise
        raise InvalidRequest(
            f"the tokenizer of {name} cannot encode the text: {error}: send another text, or token "
            "ids",
            param="prompt",
        ) from None
    return encoded.ids


def _is_of_library(error: BaseException) -> bool:
    """Whether the library raised it: a plain Exception, or a BaseException for a panic."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _load_backend(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """The tokenizer in ``folder``, and the texts of its named tokens."""
    file = folder / "tokenizer.json"
    if config.get("split_special_tokens"):
        raise CheckpointError(f"{folder / CONFIG_FILE}: split_special_tokens=true is not supported")
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as error:
            if not _is_of_library(error):
                raise
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
        backend = with_added_tokens(backend, config, num_ids=vocab_size(folder))
        names: Mapping[str, str] = named_tokens(config)
    elif any(_has(folder, files) for files in _OLDER):
        backend, names = _converted(folder, config)
    else:
        known = ", ".join(" with ".join(files) for files in _OLDER)
        raise CheckpointError(
            f"{folder}: has neither tokenizer.json nor another tokenizer ({known}); is it a "
            "Hugging Face checkpoint?"
        )
    # Saved truncation and padding are settings of the training, and do not apply to prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend, names


def _has(folder: Path, files: Sequence[str]) -> bool:
    return all((folder / name).is_file() for name in files)


def _converted(
    folder: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """An older checkpoint's tokenizer, converted by transformers, which takes seconds."""
    from transformers import AutoTokenizer

    code = config.get("auto_map")
    if code and (not isinstance(code, dict) or code.get("AutoTokenizer")):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: auto_map={reprlib.repr(code)} is not supported: code that "
            "comes with a checkpoint (trust_remote_code) is not run; save a tokenizer.json there"
        )
    try:
        found: Any = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        backend, names = found.backend_tokenizer, found.special_tokens_map
        if (folder / "tekken.json").is_file() and not names:
            names = _MISTRAL  # Neither they nor BOS before a text are in the file.
            backend.post_processor = tokenizers.processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
            )
        return backend, names
    except Exception as error:  # It raises many types, also those of its parsers.
        raise CheckpointError(
            f"{folder}: the tokenizer cannot be converted: {error}; install sentencepiece if it is "
            "missing, or save a tokenizer.json beside it"
        ) from error


def _chat_template(
    source: str | None, tools_source: str | None, special_tokens: Mapping[str, str]
) -> "ChatTemplate | None":
    if not source:
        return None
    from quire.worker.text.template.chat_template import (
        ChatTemplate,  # Its Jinja is slow to import.
    )

    try:
        return ChatTemplate(source, special_tokens=special_tokens, tools_source=tools_source)
    except RecursionError as error:
        raise CheckpointError("the chat template is nested too deeply to be read") from error
