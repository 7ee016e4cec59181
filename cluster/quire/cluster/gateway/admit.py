"""The layer that lets a request begin when its turn has come, or refuses it."""

from quire.cluster.gateway.work import Run, Take, Work
from quire.cluster.serving.bounds import Inflight
from quire.cluster.serving.queue import AdmissionQueue
from quire.cluster.serving.ticket import Ticket
from quire.cluster.telemetry import timeline


class Admit:
    """Takes places for the request's completions, and waits in the queue."""

    def __init__(self, queue: AdmissionQueue, inflight: Inflight) -> None:
        self._queue = queue
        self._inflight = inflight

    async def __call__(self, work: Work, take: Take, run: Run[Work]) -> None:
        """Raises:
        Overloaded: The request is refused, or was displaced from the queue by another one.
        DeadlineExceeded: The deadline passed while it waited.
        Unavailable: There is no group, and none came in time.
        """
        ticket = Ticket.of(
            work.requests,
            num_requests=work.num_completions,
            num_prompt_tokens=work.num_prompt_tokens,
            weight=work.weight,
        )

        def took(index: int, *, num_tokens: int, num_cached_tokens: int) -> None:
            self._queue.took(ticket, num_tokens=num_tokens, num_cached_tokens=num_cached_tokens)

        work.counts.append(took)
        with self._queue.place_of(ticket, self._inflight):
            async with self._queue.admit(ticket):
                timeline.current().admitted()
                self._queue.sending(ticket)
                await run(work, take)
