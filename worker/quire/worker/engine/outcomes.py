"""Applies the results of steps to an engine's requests: appends tokens and ends requests."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import islice

import numpy as np

from quire.worker.engine.counters import Counters
from quire.worker.engine.deltas import Pooling, broken_logits, delta_of, failure_of
from quire.worker.engine.part import Part
from quire.worker.engine.schedule import Schedule
from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import Sequence, Status
from quire.worker.engine.step_input import StepInputs
from quire.worker.model.facts import ModelFacts
from quire.worker.request.arrays import Floats
from quire.worker.request.errors import QuireError
from quire.worker.request.outputs import FinishReason, TokenDelta, TokenLogprobs
from quire.worker.step.messages import StepOutput


class Outcomes:
    """Makes the outputs of the requests in ``sequences``. A request that ends is removed from
    ``sequences`` and from every other part of the engine that keeps state of it."""

    def __init__(
        self,
        sequences: dict[str, Sequence],
        *,
        scheduler: Scheduler,
        inputs: StepInputs,
        parts: Items[Part],
        counters: Counters,
        model: ModelFacts,
    ) -> None:
        self._sequences = sequences
        self._scheduler = scheduler
        self._inputs = inputs
        self._parts = parts
        self._counters = counters
        self._pooling = Pooling(model)

    def take(self, schedule: Schedule, result: StepOutput) -> list[TokenDelta]:
        """Appends the tokens that a step sampled, and removes the requests that they end."""
        token_ids: list[int] = result.token_ids_S.tolist()
        outputs = []
        end = 0
        hidden = iter(() if result.hidden_HC is None else result.hidden_HC)
        for seq, num_samples, num_scored in zip(
            schedule.sequences, schedule.num_samples, schedule.num_scored, strict=True
        ):
            begin, end = end, end + num_samples
            own = list(islice(hidden, num_samples - num_scored)) if seq.wants_hidden else []
            # A finished request was aborted after this step was submitted, or its end was not
            # known then.
            if not num_samples or seq.status is Status.FINISHED or seq in schedule.void:
                continue
            if seq.owner is not None:
                seq.owner.owned_ran(seq)
                self._scheduler.remove(seq)
                self.forget(seq)
                continue
            drawn = begin + num_scored
            if result.broken_rows and any(row in result.broken_rows for row in range(begin, drawn)):
                outputs.append(self._break_off(seq))
                continue
            if seq.is_embedded:
                outputs.append(self._take_embedding(seq, own[0]))
                continue
            if num_scored:
                seq.prompt_logprobs += [each for each in result.logprobs[begin:drawn] if each]
            if drawn < end:
                output = self._take_samples(seq, token_ids[drawn:end], result, drawn)
                if own and output.token_ids:
                    output = output._replace(hidden=np.stack(own[: len(output.token_ids)]))
                outputs.append(output)
        for part in self._parts:
            part.sampled(schedule)
        return outputs

    def end(self, refused: Iterable[tuple[Sequence, QuireError]]) -> list[TokenDelta]:
        """Ends queued and running requests, each with an error."""
        ended = []
        for seq, error in refused:
            self._scheduler.remove(seq)
            ended.append(self.fail(seq, error))
        return ended

    def void_late(self, schedule: Schedule) -> None:
        """Discards the samples of the step under way for requests of which it is still not known
        which tokens may follow."""
        for seq in schedule.sequences:
            if seq.choices.is_pending and seq.num_in_flight and seq.status is not Status.FINISHED:
                schedule.void.add(seq)
                self._scheduler.void_sample(seq)

    def output(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        finish_reason: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> TokenDelta:
        """The output of ``seq`` with the newest ``token_ids``. Forgets ``seq`` if it has ended."""
        if finish_reason is not None:
            self.forget(seq)
        fetched, seq.fetched = seq.fetched, None
        if fetched is not None:
            for part in self._parts:
                part.began(seq, fetched)
        return delta_of(seq, token_ids, finish_reason, logprobs, fetched)

    def fail(self, seq: Sequence, error: QuireError) -> TokenDelta:
        """The last output of ``seq``, with ``error``. The scheduler must have removed it."""
        self.forget(seq)
        return failure_of(seq, error)

    def forget(self, seq: Sequence) -> None:
        del self._sequences[seq.request.request_id]
        for part in self._parts:
            part.forget(seq)
        self._inputs.forget(seq)

    def _take_embedding(self, seq: Sequence, state_C: Floats) -> TokenDelta:
        """Ends ``seq`` with its embedding. The token that the step sampled is ignored."""
        vector_C = self._pooling.vector(state_C)
        if vector_C is None:
            return self._break_off(seq)
        self._scheduler.remove(seq)
        return self.output(seq, (), "stop")._replace(hidden=vector_C[None])

    def _take_samples(
        self, seq: Sequence, drawn: list[int], result: StepOutput, begin: int
    ) -> TokenDelta:
        """Appends the tokens ``drawn`` for ``seq``, samples ``begin`` and following of ``result``.
        Removes ``seq`` if they end it."""
        if seq.draft:
            del drawn[self._scheduler.settle_draft(seq, drawn) :]
        finish_reason = None
        for number, token_id in enumerate(drawn):
            if result.broken_rows and begin + number in result.broken_rows:
                return self._break_off(seq)
            self._scheduler.append_token(seq, token_id)
            finish_reason = seq.finish_reason()
            if finish_reason is not None:
                del drawn[number + 1 :]
                break
        self._counters.num_output_tokens += len(drawn)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if result.logprobs:
            shown = result.logprobs[begin : begin + len(drawn)]
            logprobs = tuple(each for each in shown if each is not None)
        output = self.output(seq, tuple(drawn), finish_reason, logprobs)
        if finish_reason is not None:
            self._scheduler.remove(seq)
        return output

    def _break_off(self, seq: Sequence) -> TokenDelta:
        """Ends ``seq``, whose logits are NaN or infinite."""
        self._scheduler.remove(seq)
        return self.fail(seq, broken_logits(seq))
