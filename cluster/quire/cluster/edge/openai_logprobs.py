"""Log-probabilities of a choice's tokens in the form of OpenAI's API.

A token is shown by the bytes that it adds to the text at its place, so that the bytes of a choice's
tokens, joined, are the UTF-8 of its text. A token that the text leaves out adds no bytes and is
shown by its name. A token that is not text by itself, such as half a character, is shown as
``bytes:\\xe2\\x82``.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from quire.worker.request.outputs import TokenLogprobs
from quire.worker.request.request import Prepared
from quire.worker.text.detokenizer import Detokenizer, readable
from quire.worker.text.tokenizer import Tokenizer

Json = dict[str, Any]


class Logprobs:
    """Formats the log-probabilities of one choice. Its tokens must be passed in order."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = detokenizer
        self._offset = 0  # The next token's place in the text, in characters.

    @classmethod
    def of(cls, request: Prepared, tokenizer: Tokenizer) -> "Logprobs":
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=request.sampling.skip_special_tokens,
            shown_token_ids=request.shown_token_ids,
            follows=request.prompt_token_ids,
        )
        return cls(tokenizer, detokenizer)

    def chat(self, entries: Iterable[TokenLogprobs]) -> Json:
        content = []
        for entry in entries:
            top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
            chosen = self._chat_token(entry.token_id, entry.logprob)
            content.append(chosen | {"top_logprobs": top})
            self._text.push(entry.token_id)
        return {"content": content, "refusal": None}

    def completion(self, entries: Iterable[TokenLogprobs]) -> Json:
        shown = _no_completion()
        for entry in entries:
            self._add(shown, entry.token_id, entry)
        return shown

    def completion_with_prompt(
        self,
        entries: Iterable[TokenLogprobs],
        *,
        prompt: Sequence[int],
        text: str,
        scores: Sequence[TokenLogprobs],
    ) -> Json:
        """Log-probabilities of a completion behind its prompt, shown as ``text``. Only the prompt's
        last tokens have ``scores``."""
        before = Logprobs(self._tokenizer, self._tokenizer.detokenizer(skip_special_tokens=False))
        # A prompt that was sent as text is shown without the BOS token that the tokenizer added.
        before._offset = len(text) - len(self._tokenizer.decode(prompt, skip_special_tokens=False))
        shown, num_unscored = _no_completion(), len(prompt) - len(scores)
        for place, token_id in enumerate(prompt):
            before._add(
                shown, token_id, scores[place - num_unscored] if place >= num_unscored else None
            )
        self._offset = len(text)
        for name, values in self.completion(entries).items():
            shown[name] += values
        return shown

    def _add(self, shown: Json, token_id: int, entry: TokenLogprobs | None) -> None:
        name = self._name(token_id)
        shown["tokens"].append(name)
        shown["token_logprobs"].append(entry.logprob if entry else None)
        shown["top_logprobs"].append(self._top(name, entry) if entry else None)
        shown["text_offset"].append(max(0, self._offset))
        self._offset += len(self._text.push(token_id))

    def _top(self, name: str, entry: TokenLogprobs) -> Json:
        """The likeliest tokens by text, or by ``token_id:ID`` if another token has that text."""
        top: Json = {}
        for token_id, logprob in entry.top:
            key = self._name(token_id)
            is_taken = key in top or (key == name and token_id != entry.token_id)
            top[f"token_id:{token_id}" if is_taken else key] = logprob
        # The chosen token is listed even where it is not among the most probable.
        return top | {name: entry.logprob}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        piece = list(self._text.piece(token_id))
        return {"token": self._name(token_id), "logprob": logprob, "bytes": piece}

    def _name(self, token_id: int) -> str:
        if token_id in self._text.skipped:
            return self._tokenizer.token_text(token_id)
        return readable(self._text.piece(token_id))


def _no_completion() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
