"""Text to token ids and back: tokenizer, chat template, and text that arrives token by token.

Built on the `tokenizers` library and Jinja alone, so that a gateway needs neither torch nor the
seconds that importing transformers takes.
"""

import io
import json
import reprlib
import zipfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers

from quire.worker.api.errors import CheckpointError, InvalidRequest
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.model.checkpoint import read_json
from quire.worker.text.bounds import TextBound, text_bound

if TYPE_CHECKING:
    from quire.worker.text.chat_template import ChatTemplate

Message = Mapping[str, Any]
"""One turn of a chat: ``{"role": …, "content": …}``."""

_REPLACEMENT = "\ufffd"
# A tokenizer may decode a token differently at the start of a text (a space is dropped), so new
# tokens are decoded behind a few old ones.
_CONTEXT_TOKENS = 4
_MANY_TOKENS = 4_000
# A model that emits nothing but broken UTF-8 must not make each token cost more than the last.
_MAX_UNFINISHED_TOKENS = 64


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._template = _chat_template(chat_template, self._special_tokens)
        self.bound: TextBound | None = text_bound(backend)
        """How few tokens a text can have, by its length alone; ``None`` where that is not known."""

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
            CheckpointError: A file is missing or cannot be read; the message names it.
        """
        folder = Path(path)
        settings = folder / "tokenizer_config.json"
        config = read_json(settings) if settings.is_file() else {}
        template = config.get("chat_template")
        if isinstance(template, list):  # Several named ones: the one for plain chat.
            named = (entry for entry in template if isinstance(entry, dict))
            plain = (entry.get("template") for entry in named if entry.get("name") == "default")
            template = next(plain, None)
        if not isinstance(template, str | None):
            raise CheckpointError(
                f"{settings}: chat_template={reprlib.repr(template)} must "
                "be a Jinja template, or a list of objects with name and template"
            )
        file = folder / "chat_template.jinja"
        if file.is_file():
            try:
                template = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file} cannot be read as text: {error}") from error
        tokens = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in config.items()
            if name.endswith("_token")
        }
        special = {name: value for name, value in tokens.items() if isinstance(value, str)}
        return cls(_load_backend(folder), chat_template=template, special_tokens=special)

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
        config: dict[str, str] = dict(self._special_tokens)
        if self._template is not None:
            config["chat_template"] = self._template.source
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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids. Other threads run meanwhile."""
        # `encode` would keep them from it: 2 MB of text held a gateway up for 4 s, in a thread or
        # not. This one does not, and is faster, since it notes no places in the text.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def spell_out(self, params: SamplingParams) -> SamplingParams:
        """``params`` with tokens in place of ``bad_words``: of each word as it stands, and as it
        stands behind a space where that is not the same tokens behind others. Other threads run
        meanwhile.
        """
        if not params.bad_words:
            return params
        words = [word.lstrip() for word in params.bad_words]
        texts = [*words, *(f" {word}" for word in words)]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        bare, spaced = encoded[: len(words)], encoded[len(words) :]
        spelled = [tuple(each.ids) for each in bare if each.ids]
        for word, behind in zip(bare, spaced, strict=True):
            if behind.ids[-len(word.ids) :] != word.ids:
                spelled.append(tuple(behind.ids))
        given = params.bad_words_token_ids or ()
        sequences = tuple(dict.fromkeys([*given, *spelled]))
        return replace(params, bad_words=None, bad_words_token_ids=sequences)

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


class TextDelta(NamedTuple):
    text: str
    """Text that can be shown now: never the beginning of a stop string, never half a character."""
    stopped: bool
    """A stop string is complete: the request is at its end."""


class TextStream:
    """The text of one request, from tokens that arrive a few at a time.

    All deltas joined, with `finish`, are the decoded text up to the first stop string, however
    the tokens were divided.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        shown_token_ids: Set[int] = frozenset(),
    ) -> None:
        """``shown_token_ids``: special tokens that are part of the text although it leaves out the
        others."""
        self._tokenizer = tokenizer
        self._shown_token_ids = shown_token_ids if params.skip_special_tokens else frozenset()
        self._skip_special_tokens = params.skip_special_tokens
        self._stops = params.stop_strings
        self._keep_stop = params.include_stop_str_in_output
        self._window: list[int] = []  # Context tokens, then those that are not shown whole.
        self._num_context = 0
        self._num_shown = 0  # Characters of the window behind its context that went out.
        self._held = ""  # Text that could be the beginning of a stop string.
        self._stopped = False
        self.stop_string: str | None = None
        """The stop string that ended the text, once one did."""

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Adds tokens; returns the text that is now certain. After a stop, nothing more."""
        shown: list[str] = []
        for token_id in token_ids:
            if self._stopped:
                break
            text = self._decode(token_id)
            shown.append(self._hold_back_stops(text) if self._stops else text)
        return TextDelta("".join(shown), self._stopped)

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if self._stopped:
            return ""
        shown = self._hold_back_stops(self._unfinished()) if self._stops else self._unfinished()
        rest, self._held = ("" if self._stopped else self._held), ""
        self._stopped = True
        return shown + rest

    def _decode(self, token_id: int) -> str:
        if token_id in self._shown_token_ids:
            text = self._unfinished() + self._tokenizer.token_text(token_id)
            self._forget([*self._window, token_id])
            return text
        self._window.append(token_id)
        text = self._window_text()
        stable = text.rstrip(_REPLACEMENT) if text.endswith(_REPLACEMENT) else text
        unfinished = len(stable) < len(text)
        too_long = len(self._window) - self._num_context > _MAX_UNFINISHED_TOKENS
        if unfinished and not too_long:
            # Characters of one to four bytes can end in the middle; the next token may tell.
            new, self._num_shown = stable[self._num_shown :], max(self._num_shown, len(stable))
            return new
        new = text[self._num_shown :]
        self._forget(self._window)
        return new

    def _forget(self, window: list[int]) -> None:
        """All of ``window`` is shown; its last tokens are the context of the next."""
        self._window = window[-_CONTEXT_TOKENS:]
        self._num_context, self._num_shown = len(self._window), 0

    def _unfinished(self) -> str:
        return self._window_text()[self._num_shown :]

    def _window_text(self) -> str:
        """The decoded window, less its context."""
        context = self._tokenizer.decode(
            self._window[: self._num_context], skip_special_tokens=self._skip_special_tokens
        )
        whole = self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)
        return whole[len(context) :]

    def _hold_back_stops(self, text: str) -> str:
        """Passes ``text`` on, less a tail that may yet become a stop string."""
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The one that is complete first ends the text, however tokens fell together.
            start, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._stopped = True
            self.stop_string = stop
            self._held = ""
            return text[: start + len(stop) if self._keep_stop else start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of ``stop``, short of all of it, that ends ``text``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises no narrower type.
            raise CheckpointError(f"{file} cannot be read as a tokenizer: {error}") from error
    if not (folder / "tokenizer.model").is_file():
        raise CheckpointError(
            f"{folder}: has neither tokenizer.json nor tokenizer.model; is it a Hugging Face "
            "checkpoint?"
        )
    # Older checkpoints: transformers knows how to convert them, once, in seconds.
    from transformers import AutoTokenizer

    converted = AutoTokenizer.from_pretrained(folder, use_fast=True)
    backend: tokenizers.Tokenizer = converted.backend_tokenizer
    return backend


def _chat_template(source: str | None, special_tokens: Mapping[str, str]) -> "ChatTemplate | None":
    if not source:
        return None
    from quire.worker.text.chat_template import ChatTemplate  # Its Jinja is slow to import.

    try:
        return ChatTemplate(source, special_tokens=special_tokens)
    except RecursionError as error:
        raise CheckpointError("the chat template is nested too deeply to be read") from error
