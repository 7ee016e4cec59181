"""One replica group's engine: takes requests, runs steps of the model, returns tokens.

Used from one thread. The engine keeps a request until it returns an output with a finish reason,
or until `Engine.abort`. What it can do beyond continuous batching and prefix caching are parts
(`quire.worker.engine.part`), of which it knows none: `quire.worker.group_engine` passes them.

With asynchronous scheduling (`Executor.num_ahead` > 0), one step is under way between two calls:
`Engine.step` prepares and submits the next step before it waits for the tokens of that one. A
request's newest token is then in flight, and the ranks insert it themselves. Changes to logits that
depend on that token are computed and sent while the next step's model runs. If a request turns out
to have ended, or its changes are late, its token of that step is dropped. Without asynchronous
scheduling, no step is under way between two calls, and every held block belongs to a running
request or to a part.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from typing import Any

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockPool
from quire.worker.engine.counters import Counters
from quire.worker.engine.intake import Intake
from quire.worker.engine.outcomes import Outcomes
from quire.worker.engine.part import NO_PARTS, Host, Parts
from quire.worker.engine.preparing import Preparing
from quire.worker.engine.schedule import NOTHING, Schedule
from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import Sequence, Status
from quire.worker.engine.step_input import StepInputs
from quire.worker.model.facts import ModelFacts
from quire.worker.request.config import EngineConfig
from quire.worker.request.engine_stats import EngineStats
from quire.worker.request.errors import InvalidRequest, QueueFull, RankFailure
from quire.worker.request.limits import request_limits
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared
from quire.worker.step.messages import Executor


class Engine:
    """Continuous batching over a paged KV cache with prefix caching.

    ``epoch`` distinguishes this engine's block events from those of other engines and earlier runs,
    and ``num_tiers`` is the number of kinds of memory that they are about. ``make_parts`` makes the
    parts; without it there are none.

    Raises:
        ConfigError: The configuration asks for more context than the model has.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        epoch: int = 0,
        num_tiers: int = 1,
        make_parts: Callable[[Host], Parts] = lambda host: NO_PARTS,
    ) -> None:
        # Raises before parts open files or start threads.
        limits = request_limits(config, model, num_blocks=executor.num_blocks)
        self.events = EventLog(epoch=epoch, num_tiers=num_tiers, keeps_contents=config.kv_events)
        self._config = config
        self._model = model
        self._executor = executor
        self._clock = clock
        self._pool = BlockPool(
            num_blocks=executor.num_blocks,
            block_size=config.block_size,
            log=self.events,
            seconds=clock,
        )
        parts = make_parts(
            Host(
                pool=self._pool,
                log=self.events,
                clock=clock,
                is_idle=lambda: not (self._scheduler.running or self._scheduler.num_waiting),
                run_copies=self._run_copies,
                stop_naming=self._stop_naming,
            )
        )
        self._parts = parts.every
        self._intake = Intake(config, model, executor, limits=limits, choices_of=parts.choices_of)
        self._scheduler = Scheduler(
            pool=self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            takes_whole=model.is_encoder,
            parts=parts,
        )
        self._inputs = StepInputs(block_size=config.block_size)
        self._preparing = Preparing(self._parts)
        self._under_way: deque[Schedule] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._complete: list[Sequence] = []
        self._last_sequences: list[Sequence] = []
        self._counters = Counters()
        self._outcomes = Outcomes(
            self._sequences,
            scheduler=self._scheduler,
            inputs=self._inputs,
            parts=self._parts,
            counters=self._counters,
            model=model,
        )
        self._failure: str | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens, that model, configuration and KV cache allow."""
        return self._intake.limits.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        requests = self._sequences or self._under_way
        return bool(requests) or any(part.has_work for part in self._parts)

    def check_request(self, request: Prepared) -> None:
        """Checks a request without adding it: everything that `add_request` and the parts check,
        which may take long.

        Raises:
            InvalidRequest: The request can never be served, or its id is in use.
        """
        self._max_tokens(request)
        for part in self._parts:
            part.check(request)

    def add_request(self, request: Prepared) -> None:
        """Queues a request. Later calls of `step` return its outputs.

        Raises:
            InvalidRequest: It can never be served, or its id is in use.
            QueueFull: ``max_num_waiting`` requests are waiting, or a part has no room for it.
            RankFailure: The engine has failed or is closed.
        """
        self._check_alive()
        max_tokens = self._max_tokens(request)
        num_waiting = self._num_waiting
        if num_waiting >= self._config.max_num_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, max_num_waiting is "
                f"{self._config.max_num_waiting}: try again later"
            )
        seq = self._intake.sequence(request, max_tokens)
        for part in self._parts:
            part.claim(seq)
        self._sequences[request.request_id] = seq
        # The resumed output is already complete.
        if seq.finish_reason():
            self._complete.append(seq)
        elif self._preparing.add(seq):
            self._scheduler.add(seq)

    def abort(self, request_id: str) -> bool:
        """Ends a request without another output. Its blocks are released before this returns, or
        after the last step under way that includes it.

        Returns whether the engine had the request.
        """
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        if seq in self._complete:
            self._complete.remove(seq)
        elif not self._preparing.remove(seq):
            self._scheduler.remove(seq)
        self._outcomes.forget(seq)
        return True

    def step(self) -> list[TokenDelta]:
        """Submits the scheduler's next step. If too many are under way, waits for the oldest one.

        Returns one output for each request that got tokens or ended.

        Raises:
            RankFailure: The executor failed. Every request is lost, and all later calls fail.
        """
        self._check_alive()
        begin_s = self._clock()
        outputs = [self._outcomes.output(seq, (), seq.finish_reason()) for seq in self._complete]
        self._complete.clear()
        for part in self._parts:
            part.begin(is_decoding=bool(self._scheduler.running), step_s=self._counters.step_s)
        if self._preparing.has_work:
            outputs += self._let_in()
        outputs += self._await_choices(self._last_sequences)
        if not self._sequences:
            self._add_own()
        is_short = any(part.wants_short_steps for part in self._parts)
        schedule = self._scheduler.schedule(is_short=is_short)
        self._last_sequences = schedule.sequences
        num_prefilled = schedule.num_prefilled
        is_step = bool(schedule.sequences) or any(part.needs_step for part in self._parts)
        edits_follow = is_step and self._submit(schedule)
        if len(self._under_way) > (self._executor.num_ahead if is_step else 0):
            outputs += self._take_tokens()
        if edits_follow:
            outputs += self._await_choices(schedule.sequences)
            self._outcomes.void_late(schedule)
            with self._failing():
                self._executor.send_edits(self._inputs.edits_that_follow(schedule))
        if not self._under_way and not schedule.sequences:
            outputs += self._await_choices((), is_idle=True)
        self._drop_tokens()
        if is_step:
            seconds = self._clock() - begin_s
            leaves_prompts = num_prefilled > 0 and self._scheduler.num_pending_prefill_tokens > 0
            self._counters.stepped(num_prefilled, seconds, leaves_prompts=leaves_prompts)
            for part in self._parts:
                part.timed(num_prefilled, seconds)
        elif not (self._under_way or self._scheduler.running):
            for part in self._parts:
                part.wait()
        return outputs

    def stats(self) -> EngineStats:
        of_parts = {name: value for part in self._parts for name, value in part.stats().items()}
        return self._counters.stats(
            self._scheduler, self._pool, num_waiting=self._num_waiting, of_parts=of_parts
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix, and what parts know of other requests' tokens. Returns
        false, and forgets nothing, while a running request holds blocks."""
        self._drop_tokens()
        if not self._pool.reset():
            return False
        for part in self._parts:
            part.reset()
        return True

    def close(self) -> None:
        """Stops the executor; its requests are lost. Parts may first save blocks, for a few seconds
        at most. Can be called again."""
        if self._failure is None:
            with suppress(RankFailure):  # The blocks that would have been saved are lost.
                for part in self._parts:
                    part.save()
        self._failure = self._failure or "the engine is closed"
        for part in self._parts:
            part.close()
        self._executor.close()

    @property
    def _num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._preparing)

    def _add_own(self) -> None:
        """Called when there are no requests: queues what a part wants to compute."""
        for part in self._parts:
            seq = part.own_sequence()
            if seq is not None:
                self._sequences[seq.request.request_id] = seq
                self._scheduler.add(seq)
                return

    def _stop_naming(self, wrong: frozenset[BlockHash]) -> None:
        """Stops sharing blocks of sequences that use ``wrong`` blocks: their later KV is wrong."""
        for seq in self._sequences.values():
            if seq.num_blocks and not wrong.isdisjoint(seq.hashes):
                seq.stop_naming()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RankFailure(self._failure)

    def _max_tokens(self, request: Prepared) -> int:
        if request.request_id in self._sequences:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use: abort that request first, or take "
                "another id",
                param="request_id",
            )
        return self._intake.max_tokens(request)

    def _submit(self, schedule: Schedule) -> bool:
        """Submits a step. Returns whether changes to its logits must follow."""
        step = self._inputs.build(schedule, self._fields(schedule))
        with self._failing():
            self._executor.submit(step)
        self._scheduler.submitted(schedule)
        self._under_way.append(schedule)
        return step.edits_follow

    def _fields(self, schedule: Schedule) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for part in self._parts:
            fields |= part.chosen(schedule)
        return fields

    def _run_copies(self) -> None:
        """Finishes the steps under way, then runs a step that only copies blocks."""
        while self._under_way:
            self._take_tokens()
        with self._failing():
            self._executor.submit(self._inputs.build(NOTHING, self._fields(NOTHING)))
            self._executor.result()
        for part in self._parts:
            part.ran()

    def _drop_tokens(self) -> None:
        """If no request is left, waits for the steps under way and drops their outputs."""
        while self._under_way and not self._sequences:
            self._take_tokens()

    def _let_in(self) -> list[TokenDelta]:
        """Queues the requests that parts have prepared. Ends those that were refused, and returns
        their last outputs."""
        scheduler = self._scheduler
        is_idle = not (self._under_way or scheduler.running or scheduler.num_waiting)
        ready, refused = self._preparing.take(
            is_idle=is_idle, num_pending_tokens=scheduler.num_pending_prefill_tokens
        )
        for seq in ready:
            scheduler.add(seq)
        ended = []
        for seq, error in refused:
            seq.status = Status.FINISHED
            ended.append(self._outcomes.fail(seq, error))
        return ended

    def _await_choices(
        self, running: Items[Sequence], *, is_idle: bool = False
    ) -> list[TokenDelta]:
        """Waits for what is pending, as long as a step may. Ends requests that cannot go on."""
        ended: list[TokenDelta] = []
        for part in self._parts:
            ended += self._outcomes.end(part.await_choices(running, is_idle=is_idle))
        return ended

    def _take_tokens(self) -> list[TokenDelta]:
        """Waits for the oldest step under way and returns its outputs."""
        with self._failing():
            result = self._executor.result()
        schedule = self._under_way.popleft()
        self._counters.num_steps += bool(schedule.sequences)
        for part in self._parts:
            part.ran()
        self._scheduler.finished()
        return self._outcomes.take(schedule, result)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Marks the engine as failed on any exception: even an interrupt leaves ranks mid-step."""
        try:
            yield
        except BaseException as error:
            self._failure = f"the engine has failed in an earlier step: {error!r}"
            raise
