"""The layer that runs a request's completions side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from quire.cluster.gateway.losses import losses_of_prompt
from quire.cluster.gateway.output import Output
from quire.cluster.gateway.work import Completion, Parts, Run, Take, Work
from quire.cluster.telemetry import timeline
from quire.cluster.wire import work_of

T = TypeVar("T")


class FanOut:
    """Ends a request's pipeline: its completions go on one by one. ``run`` runs one of them."""

    def __init__(self, parts: Parts, run: Run[Completion]) -> None:
        self._parts = parts
        self._run = run

    async def __call__(self, work: Work, take: Take) -> None:
        completions = completions_of(work, self._parts)
        await together([partial(self._run, one) for one in completions], take)


def completions_of(work: Work, parts: Parts) -> Iterator[Completion]:
    """The completions of all prompts of ``work``, numbered across them."""
    index = 0
    call = timeline.current()
    for prompt in work.requests:
        encoded = work_of(prompt)
        losses = losses_of_prompt(parts.config, prompt.sampling.n)
        for request, of_it in zip(prompt.completions(), losses, strict=True):
            yield Completion(
                work=work,
                request=request,
                index=index,
                encoded=encoded,
                losses=of_it,
                record=call.completion(
                    request.request_id,
                    index=index,
                    is_first_of_prompt=request.completion == 0,
                    counters=parts.telemetry,
                ),
                output=Output(request, parts.tokenizer),
            )
            index += 1


async def together(
    sources: Sequence[Callable[[Callable[[T], Awaitable[object]]], Awaitable[None]]],
    take: Callable[[T], Awaitable[object]],
) -> None:
    """Runs all ``sources`` until they have ended. Each hands its items to ``take``, which gets one
    at a time.

    The first exception in a source cancels the others and is raised here. All have ended when this
    returns or raises, including when it is cancelled.
    """
    if len(sources) == 1:
        await sources[0](take)
        return
    turn = asyncio.Lock()

    async def in_turn(item: T) -> None:
        async with turn:
            await take(item)

    tasks = [asyncio.ensure_future(source(in_turn)) for source in sources]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
