"""Messages of `vllm.grpc.engine` as our requests, and our answers as its messages.

Defaults are those of vLLM's own servicer: a number that proto3 cannot tell from absent is not set.
Answers have tokens and no text, so ``spaces_between_special_tokens`` decides nothing; constraints
hold from the first token on, so ``grammar_from_first_token`` does not either.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as vllm

from quire.cluster.failover.chunk import Chunk
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.outputs import TokenLogprobs
from quire.worker.api.request import Prepared, Prompt, Text, Tokens
from quire.worker.api.sampling_params import PARAMETERS, SamplingParams
from quire.worker.api.structured import StructuredOutputsParams

_CONSTRAINTS = {"json_schema": "json"}
"""Constraints whose names differ from ours."""
_REFUSED = {
    "mm_inputs": "this model takes text alone",
    "extra_mm_inputs": "this model takes text alone",
    "media_refs": "this model takes text alone",
    "kv_transfer_params": "prefill and decode are not apart here",
    "kv_transfer_params_json": "prefill and decode are not apart here",
    "data_parallel_rank": "the gateway chooses the replica group",
}


def aliases_of(request: vllm.GenerateRequest) -> Mapping[str, str]:
    """What ``request`` calls the fields that our errors name otherwise."""
    prompt = "text" if request.HasField("text") else "input_ids"
    return {"prompt": prompt, "structured_outputs": "constraint"}


def prompt_of(request: vllm.GenerateRequest) -> Prompt:
    """Raises InvalidRequest: there is none, or it asks for what is not served."""
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
    """Raises InvalidRequest: a value is out of its range."""
    given = {field.name: value for field, value in params.ListFields() if field.name in PARAMETERS}
    # Absent, a proto3 bool is false: this one is true in ours.
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

    A stream has a chunk for each of ours, and behind a completion's last one a ``complete`` that
    repeats it. Otherwise there is one ``complete`` for each completion, once all have ended.
    """

    def __init__(self, request: Prepared, *, is_stream: bool) -> None:
        self._prompt = request.prompt_token_ids
        self._sampling = request.sampling
        self._is_stream = is_stream
        self._answers: dict[int, vllm.GenerateComplete] = defaultdict(vllm.GenerateComplete)
        """Answers by index, with all tokens so far; in a stream, with those of the last chunk."""

    def of(self, chunk: Chunk) -> Iterator[vllm.GenerateResponse]:
        """What is to be sent now that ``chunk`` has come."""
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
        """What is to be sent once the request was aborted; nothing where it had ended."""
        if self._num_ended() == self._sampling.n:
            return
        for index in range(self._sampling.n):
            answer = self._answers[index]
            if answer.finish_reason:
                continue
            answer.index = index
            answer.prompt_tokens = len(self._prompt)
            answer.finish_reason = "abort"
            if self._is_stream:  # The tokens were in a chunk.
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
        # The first token has nothing before it.
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
