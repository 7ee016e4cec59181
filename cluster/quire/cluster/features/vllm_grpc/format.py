"""Converts messages of `vllm.grpc.engine` to Quire's requests, and Quire's answers to its messages.

Defaults are those of vLLM's own servicer: a number that proto3 cannot distinguish from absent
counts as absent. Answers have tokens and no text, so ``spaces_between_special_tokens`` has no
effect. Constraints hold from the first token on, so ``grammar_from_first_token`` has none either.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from quire.cluster.gateway.chunk import Chunk
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.request.request import Prepared, Prompt, Text, Tokens
from quire.worker.request.sampling_params import PARAMETERS, SamplingParams
from quire.worker.request.structured import StructuredOutputsParams

_CONSTRAINTS = {"json_schema": "json"}
"""Names of constraints that differ from Quire's."""
_REFUSED = {
    "mm_inputs": "this model takes text alone",
    "extra_mm_inputs": "this model takes text alone",
    "media_refs": "this model takes text alone",
    "kv_transfer_params": "prefill and decode are not apart here",
    "kv_transfer_params_json": "prefill and decode are not apart here",
    "data_parallel_rank": "the gateway chooses the replica group",
}


def aliases_of(request: vllm.GenerateRequest) -> Mapping[str, str]:
    """Names of ``request``'s fields that differ in Quire's error messages, by Quire's name."""
    prompt = "text" if request.HasField("text") else "input_ids"
    return {"prompt": prompt, "structured_outputs": "constraint"}


def prompt_of(request: vllm.GenerateRequest) -> Prompt:
    """The prompt. Raises InvalidRequest if there is none, or if it needs something that is not
    served."""
    for field, value in request.ListFields():
        if field.name in _REFUSED and value != 0:
            raise InvalidRequest(
                f"{field.name} is not supported: leave it out, {_REFUSED[field.name]}",
                param=field.name,
            )
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input is missing: set tokenized or text", param="input")
    return (Text(request.text) if kind == "text" else Tokens(request.tokenized.input_ids),)


def sampling_of(params: vllm.SamplingParams) -> SamplingParams:
    """The sampling parameters. Raises InvalidRequest if a value is out of range."""
    given = {field.name: value for field, value in params.ListFields() if field.name in PARAMETERS}
    # An absent proto3 bool is false, but this field's default in Quire is true.
    given["skip_special_tokens"] = params.skip_special_tokens
    given["structured_outputs"] = _constraint(params)
    return SamplingParams(**{"max_tokens": None, **given})


def _constraint(params: vllm.SamplingParams) -> StructuredOutputsParams | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    value = list(params.choice.choices) if kind == "choice" else getattr(params, kind)
    given: dict[str, Any] = {_CONSTRAINTS.get(kind, kind): value}
    return StructuredOutputsParams(**given)


class Answers:
    """The messages that answer one request.

    A stream has one message per chunk, and after a completion's last chunk a ``complete`` that
    repeats it. Otherwise there is one ``complete`` per completion, once all have ended.
    """

    def __init__(self, request: Prepared, *, is_stream: bool) -> None:
        self._prompt = request.prompt_token_ids
        self._sampling = request.sampling
        self._is_stream = is_stream
        self._answers: dict[int, vllm.GenerateComplete] = defaultdict(vllm.GenerateComplete)
        """Answers by index: with all tokens so far, or, in a stream, with those of the last
        chunk."""

    def of(self, chunk: Chunk) -> Iterator[vllm.GenerateResponse]:
        """The messages to send for ``chunk``."""
        part = self._part(chunk)
        answer = self._answers[chunk.index]
        if self._is_stream:
            part.cached_tokens = part.cached_tokens or answer.cached_tokens
            answer.CopyFrom(part)
            yield vllm.GenerateResponse(chunk=self._chunk(part))
        else:
            answer.MergeFrom(part)
            answer.completion_tokens = len(answer.output_ids)
        if chunk.finish_reason is None:
            return
        answer.finish_reason = chunk.finish_reason
        if isinstance(chunk.stop_reason, int):
            answer.matched_token_id = chunk.stop_reason
        elif chunk.stop_reason is not None:
            answer.matched_stop_str = chunk.stop_reason
        if self._is_stream:
            yield vllm.GenerateResponse(complete=answer)
        elif self._num_ended() == self._sampling.n:
            yield from self._all()

    def aborted(self) -> Iterator[vllm.GenerateResponse]:
        """The messages to send after the request was aborted; none if it had ended."""
        if self._num_ended() == self._sampling.n:
            return
        for index in range(self._sampling.n):
            answer = self._answers[index]
            if answer.finish_reason:
                continue
            answer.index = index
            answer.prompt_tokens = len(self._prompt)
            answer.finish_reason = "abort"
            if self._is_stream:  # The chunks had the tokens.
                for field in ("output_ids", "completion_tokens", "output_logprobs"):
                    answer.ClearField(field)
                yield vllm.GenerateResponse(complete=answer)
        if not self._is_stream:
            yield from self._all()

    def _all(self) -> Iterator[vllm.GenerateResponse]:
        for _, answer in sorted(self._answers.items()):
            yield vllm.GenerateResponse(complete=answer)

    def _num_ended(self) -> int:
        return sum(bool(answer.finish_reason) for answer in self._answers.values())

    def _part(self, chunk: Chunk) -> vllm.GenerateComplete:
        part = vllm.GenerateComplete(
            output_ids=chunk.token_ids,
            prompt_tokens=len(self._prompt),
            completion_tokens=len(chunk.token_ids),
            cached_tokens=0 if chunk.start is None else chunk.start.num_cached_tokens,
            index=chunk.index,
        )
        if chunk.logprobs:
            self._add_scores(part.output_logprobs, chunk.logprobs)
        if chunk.start is not None and chunk.start.prompt_logprobs:
            self._add_prompt_scores(part.input_logprobs, chunk.start.prompt_logprobs)
        return part

    def _add_scores(self, to: vllm.OutputLogProbs, scores: Sequence[TokenLogprobs]) -> None:
        to.token_ids.extend(score.token_id for score in scores)
        to.token_logprobs.extend(score.logprob for score in scores)
        if self._sampling.logprobs:
            to.top_logprobs.extend(map(_top, scores))

    def _add_prompt_scores(self, to: vllm.InputLogProbs, scores: Sequence[TokenLogprobs]) -> None:
        to.token_ids.extend(self._prompt.tolist())
        # The first token has no log-probability: nothing precedes it.
        for _ in range(len(self._prompt) - len(scores)):
            to.token_logprobs.add()
            if self._sampling.prompt_logprobs:
                to.top_logprobs.add()
        to.token_logprobs.extend(vllm.InputTokenLogProb(value=each.logprob) for each in scores)
        if self._sampling.prompt_logprobs:
            to.top_logprobs.extend(map(_top, scores))

    @staticmethod
    def _chunk(part: vllm.GenerateComplete) -> vllm.GenerateStreamChunk:
        chunk = vllm.GenerateStreamChunk(
            token_ids=part.output_ids,
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            cached_tokens=part.cached_tokens,
            index=part.index,
        )
        for name in ("output_logprobs", "input_logprobs"):
            if part.HasField(name):
                getattr(chunk, name).CopyFrom(getattr(part, name))
        return chunk


def _top(score: TokenLogprobs) -> vllm.TopLogProbs:
    return vllm.TopLogProbs(
        values=[logprob for _, logprob in score.top], token_ids=[each for each, _ in score.top]
    )
