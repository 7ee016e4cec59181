"""Builds the completions of the offline API from the engine's tokens."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.worker.request.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    TokenDelta,
    TokenLogprobs,
)
from quire.worker.request.request import Prepared
from quire.worker.text.text_stream import TextStream
from quire.worker.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

    from quire.worker.text.embeddings import OfflineEmbedding


class OfflineCompletion:
    """A completion in progress: the engine's tokens, and their text."""

    def __init__(
        self, request: Prepared, *, prompt: str | None, index: int, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.index = index
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._tokenizer = tokenizer
        self._stream: TextStream | None = None
        if tokenizer is not None:
            follows = request.prompt_token_ids
            self._stream = TextStream(tokenizer, request.sampling, follows=follows)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def receive(self, delta: TokenDelta) -> None:
        """Adds a step's tokens. Sets ``finish_reason`` after the last ones.

        Raises:
            BrokenLogits: The logits were NaN or infinite.
        """
        if delta.error is not None:
            raise delta.error
        if not self._token_ids:
            self.num_cached_tokens = delta.num_cached_tokens
            self._prompt_logprobs += delta.prompt_logprobs
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        if self._stream is None:
            return
        stopped = False
        for token_id in self._shown(delta.token_ids, delta.finish_reason):
            text, stopped = self._stream.push(token_id)
            self._texts.append(text)
        if stopped:
            self.finish_reason = "stop"
        elif delta.finish_reason is not None:
            self._texts.append(self._stream.finish())
            if self._stream.stop_string is not None:
                self.finish_reason = "stop"

    def output(self) -> CompletionOutput:
        """The completion, once it has ended."""
        assert self.finish_reason is not None
        logprobs = None
        num_ranked = self.request.sampling.num_logprobs
        if num_ranked >= 0:
            logprobs = [self._readable(token, num_ranked) for token in self._logprobs]
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=logprobs,
            cumulative_logprob=None
            if logprobs is None
            else sum(token.logprob for token in self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason(),
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Log-probabilities of each prompt token, if requested."""
        num_ranked = self.request.sampling.prompt_logprobs
        if num_ranked is None:
            return None
        scores = [self._readable(token, num_ranked) for token in self._prompt_logprobs]
        return [None] * (len(self.request.prompt_token_ids) - len(scores)) + scores

    def _shown(self, token_ids: Sequence[int], reason: FinishReason | None) -> Sequence[int]:
        """The tokens that the text shows. As in vLLM, the stop token is not part of the text."""
        hidden = reason == "stop" and not self.request.sampling.include_stop_str_in_output
        return token_ids[:-1] if hidden else token_ids

    def _stop_reason(self) -> str | int | None:
        if self._stream is not None and self._stream.stop_string is not None:
            return self._stream.stop_string
        stop_ids = self.request.sampling.stop_token_ids or ()
        by_token = self.finish_reason == "stop" and self._token_ids[-1] in stop_ids
        return self._token_ids[-1] if by_token else None

    def _readable(self, token: TokenLogprobs, num_ranked: int) -> dict[int, Logprob]:
        """Log-probabilities by token id, with text. The first ``num_ranked`` tokens of ``top`` are
        the most probable ones."""
        ranked: list[tuple[int, float, int | None]] = [
            (token_id, value, rank if rank <= num_ranked else None)
            for rank, (token_id, value) in enumerate(token.top, 1)
        ]
        ranked.append((token.token_id, token.logprob, token.rank))
        return {
            token_id: Logprob(
                logprob=value,
                rank=rank,
                decoded_token=self._tokenizer.token_text(token_id) if self._tokenizer else "",
            )
            for token_id, value, rank in ranked
        }


class Progress:
    """A progress bar of completions, with tokens per second and the share of cached prompt."""

    def __init__(self, *, num_completions: int, shown: bool) -> None:
        self._bar = _bar(num_completions) if shown else None
        self._began_s = time.monotonic()
        self._num_output = self._num_prompt = self._num_cached = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(
        self, delta: TokenDelta, completion: "OfflineCompletion | OfflineEmbedding"
    ) -> None:
        self._num_output += len(delta.token_ids)
        if completion.finish_reason is None or self._bar is None:
            return
        self._num_prompt += len(completion.request.prompt_token_ids)
        self._num_cached += completion.num_cached_tokens
        took_s = max(time.monotonic() - self._began_s, 1e-9)
        self._bar.set_postfix_str(
            f"{self._num_output / took_s:.0f} output tokens/s, "
            f"{self._num_cached / self._num_prompt:.0%} of prompt cached",
            refresh=False,
        )
        self._bar.update()


def _bar(num_completions: int) -> "tqdm[Any]":
    from tqdm import tqdm  # Slow to import, and not needed if nothing is shown.

    return tqdm(total=num_completions, desc="Completions", dynamic_ncols=True)


def request_output(completions: Sequence[OfflineCompletion]) -> RequestOutput:
    """The return value of `LLM.generate` for the completions of one prompt."""
    first = completions[0]
    return RequestOutput(
        request_id=first.request.request_id.partition("-")[0],
        prompt=first.prompt,
        prompt_token_ids=first.request.prompt_token_ids.tolist(),
        num_cached_tokens=first.num_cached_tokens,
        outputs=[completion.output() for completion in completions],
        prompt_logprobs=first.prompt_logprobs(),
    )
