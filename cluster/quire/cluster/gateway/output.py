"""A completion's output so far: its tokens, their text, and where a stop string ends it."""

from quire.cluster.gateway.chunk import Chunk
from quire.worker.request.outputs import FinishReason
from quire.worker.request.request import Prepared
from quire.worker.text.text_stream import TextStream
from quire.worker.text.tokenizer import Tokenizer


class Output:
    """The output of one completion, of all its attempts."""

    def __init__(self, request: Prepared, tokenizer: Tokenizer) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        """Set with the last token."""
        self._sampling = request.sampling
        self._text = TextStream(
            tokenizer,
            request.sampling,
            follows=request.prompt_token_ids,
            shown_token_ids=request.shown_token_ids,
            reasoning=request.reasoning,
        )

    def add(self, token_ids: list[int], reason: FinishReason | None, chunk: Chunk) -> int:
        """Appends tokens to the output and to ``chunk``, up to the end of a stop string; returns
        their number. ``reason``: why the group ended the completion, if it did."""
        self.finish_reason = reason
        # As in vLLM, the text does not include the stop token.
        num_shown = len(token_ids)
        if reason == "stop":
            num_shown -= not self._sampling.include_stop_str_in_output
        shown = ""
        for position in range(num_shown):
            # One at a time, because tokens after the stop string are not part of the answer.
            text, stopped = self._text.push(token_ids[position])
            shown += text
            if stopped:
                self.finish_reason = "stop"
                del token_ids[position + 1 :]
                break
        chunk.text += shown
        self.token_ids += token_ids
        chunk.token_ids += token_ids
        if self.finish_reason is not None:
            self._finish(chunk)
        return len(token_ids)

    def _finish(self, chunk: Chunk) -> None:
        chunk.text += self._text.finish()
        chunk.finish_reason = self.finish_reason
        stop_token_ids = self._sampling.stop_token_ids or ()
        if self._text.stop_string is not None:
            chunk.stop_reason = self._text.stop_string
        elif (
            self.finish_reason == "stop" and stop_token_ids and self.token_ids[-1] in stop_token_ids
        ):
            chunk.stop_reason = self.token_ids[-1]
