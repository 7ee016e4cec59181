"""One replica group's engine: takes requests, runs steps of the model, returns tokens.

Used from one thread. The engine keeps a request until it returns an output with a finish reason,
or until `Engine.abort`.

With asynchronous scheduling (`Executor.num_ahead` > 0), one step is under way between two calls:
`Engine.step` prepares and submits the next step before it waits for the tokens of that one. A
request's newest token is then in flight, and the ranks insert it themselves. Penalties and
constraint masks depend on that token; they are computed and sent while the next step's model runs.
If a request turns out to have ended, or its mask is late, its token of that step is dropped.
Without asynchronous scheduling, no step is under way between two calls, and every held block
belongs to a running request, a loan, or a transfer (`quire.worker.parts.tiers.tiers`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager, suppress
from math import inf

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.engine.block_pool import BlockPool
from quire.worker.engine.counters import Counters
from quire.worker.engine.entrance import Entrance
from quire.worker.engine.intake import Intake, speculates
from quire.worker.engine.messages import Executor
from quire.worker.engine.outcomes import Outcomes
from quire.worker.engine.schedule import NOTHING, Schedule
from quire.worker.engine.scheduler import Scheduler
from quire.worker.engine.sequence import Sequence, Status
from quire.worker.engine.step_input import StepInputs
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.adapters.reading import Read
from quire.worker.parts.constraints.masks import Masks
from quire.worker.parts.tiers.audit import Audit
from quire.worker.parts.tiers.loan import Loan
from quire.worker.parts.tiers.pull import Fetch
from quire.worker.parts.tiers.tiers import make_travel, num_tiers
from quire.worker.request.config import EngineConfig
from quire.worker.request.engine_stats import EngineStats
from quire.worker.request.errors import InvalidRequest, QueueFull, RankFailure
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared
from quire.worker.text.tokenizer import Tokenizer


class Engine:
    """Continuous batching over a paged KV cache with prefix caching.

    ``epoch`` distinguishes this engine's block events from those of other engines and earlier runs.
    ``load_tokenizer`` is called in a thread for the first request with a constraint; by default it
    loads the tokenizer of ``config.model``. ``read_adapter`` finds and checks an adapter in a
    thread; by default it reads the node's store.

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
        load_tokenizer: Callable[[], Tokenizer] | None = None,
        read_adapter: Read | None = None,
        fetch: Fetch | None = None,
    ) -> None:
        self.events = EventLog(
            epoch=epoch, num_tiers=num_tiers(config), keeps_contents=config.kv_events
        )
        self._intake = Intake(config, model, executor)
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
        self._travel = make_travel(
            self._pool, self.events, config, model, executor, fetch=fetch, clock=clock
        )
        self._audit: Audit | None = None
        if self._travel is not None:
            self._audit = Audit(self._travel, self._pool, on_wrong=self._stop_naming)
        self._scheduler = Scheduler(
            pool=self._pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            policy=config.scheduling_policy,
            speculates=speculates(config, executor),
            takes_whole=model.is_encoder,
            max_adapters=config.max_loras,
            travel=self._travel,
        )
        self._inputs = StepInputs(block_size=config.block_size)
        self._entrance = Entrance(
            config,
            model,
            load_tokenizer=load_tokenizer,
            read_adapter=read_adapter,
            travel=self._travel,
            is_idle=lambda: not (self._scheduler.running or self._scheduler.num_waiting),
            clock=clock,
        )
        self._masks = Masks()
        self._under_way: deque[Schedule] = deque()
        self._sequences: dict[str, Sequence] = {}
        self._complete: list[Sequence] = []
        self._beside: list[Sequence] = []
        self._counters = Counters()
        self._outcomes = Outcomes(
            self._sequences,
            scheduler=self._scheduler,
            inputs=self._inputs,
            masks=self._masks,
            reading=self._entrance.reading,
            counters=self._counters,
            model=model,
            audit=self._audit,
        )
        self._failure: str | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens, that model, configuration and KV cache allow."""
        return self._intake.limits.max_model_len

    @property
    def adapters(self) -> tuple[str, ...]:
        """The digests of the adapters that are ready, the most recently used one last."""
        return self._entrance.reading.kept

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        travels = self._travel is not None and self._travel.has_work
        return bool(self._sequences or self._under_way or travels or self._audit)

    def check_request(self, request: Prepared) -> None:
        """Checks a request without adding it: everything that `add_request`, the compilation of its
        constraint and the reading of its adapter check. Compiles the one and reads the other.

        Raises:
            InvalidRequest: The request can never be served, or its id is in use.
        """
        self._max_tokens(request)
        if request.adapter:
            self._entrance.reading.check(request.adapter)
        if request.sampling.constraint is not None:
            self._entrance.compiling.grammars.compile(
                request.sampling.constraint, tenant=request.tenant, is_checked=request.is_checked
            )

    def add_request(self, request: Prepared) -> None:
        """Queues a request. Later calls of `step` return its outputs.

        Raises:
            InvalidRequest: It can never be served, or its id is in use.
            QueueFull: ``max_num_waiting`` requests are waiting, or requests name too many adapters.
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
        if request.adapter:
            self._entrance.reading.claim(seq)
        self._sequences[request.request_id] = seq
        # The resumed output is already complete.
        if seq.finish_reason():
            self._complete.append(seq)
        elif self._entrance.add(seq):
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
        elif not self._entrance.remove(seq):
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
        if self._travel is not None:
            is_decoding = bool(self._scheduler.running)
            self._travel.advance(is_decoding=is_decoding, step_s=self._counters.step_s)
        if self._entrance.has_work:
            outputs += self._let_in()
        outputs += self._outcomes.end_refused(self._masks.take(beside=self._beside))
        if self._audit and not self._sequences:
            self._begin_check(self._audit)
        # Blocks that arrive while a step runs are copied by the next step.
        schedule = self._scheduler.schedule(is_short=self._entrance.fetches_for_queued)
        self._beside = schedule.sequences
        num_prefilled = schedule.num_prefilled
        edits_follow = False
        is_step = bool(schedule.sequences)
        copies_X22 = None
        if self._travel is not None:
            is_step = is_step or len(self._travel.copies) > 0
            copies_X22 = self._travel.submitted() if is_step else None
        if is_step:
            step = self._inputs.build(schedule, copies_X22)
            edits_follow = step.edits_follow
            with self._failing():
                self._executor.submit(step)
            self._scheduler.submitted(schedule)
            self._under_way.append(schedule)
        if len(self._under_way) > (self._executor.num_ahead if is_step else 0):
            outputs += self._take_tokens()
        if edits_follow:
            outputs += self._outcomes.end_refused(self._masks.take(beside=schedule.sequences))
            self._outcomes.void_late(schedule)
            with self._failing():
                self._executor.send_edits(self._inputs.edits_that_follow(schedule))
        if not self._under_way and not schedule.sequences:
            outputs += self._outcomes.end_refused(self._masks.take_first())
        self._settle()
        if is_step:
            seconds = self._clock() - begin_s
            leaves_prompts = num_prefilled > 0 and self._scheduler.num_pending_prefill_tokens > 0
            self._counters.stepped(num_prefilled, seconds, leaves_prompts=leaves_prompts)
            if num_prefilled and self._entrance.arriving is not None:
                self._entrance.arriving.computed(num_prefilled, seconds)
        elif self._travel is not None and not (self._under_way or self._scheduler.running):
            arriving = self._entrance.arriving
            most_s = arriving.left_s if arriving else inf
            self._travel.wait(for_arrivals=bool(arriving), most_s=most_s)
        return outputs

    def stats(self) -> EngineStats:
        return self._counters.stats(
            self._scheduler,
            self._pool,
            num_waiting=self._num_waiting,
            max_adapters=self._config.max_loras if self._config.enable_lora else 0,
            travelled={} if self._travel is None else self._travel.stats(),
        )

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix, and the past outputs that draft tokens are taken from.
        Returns false, and forgets nothing, while a running request holds blocks."""
        self._settle()
        if not self._pool.reset():
            return False
        if self._travel is not None:
            self._travel.reset()
        self._scheduler.forget_outputs()
        return True

    def close(self) -> None:
        """Stops the executor; its requests are lost. Writes blocks that the disk does not have yet,
        for a few seconds at most. Can be called again."""
        if self._failure is None and self._travel is not None:
            with suppress(RankFailure):  # The blocks that it would have saved are lost.
                self._travel.save_all(self._run_copies)
        self._failure = self._failure or "the engine is closed"
        self._entrance.close()
        self._masks.close()
        if self._travel is not None:
            self._travel.close()
        self._executor.close()

    def lend(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | str:
        """Lends the longest prefix of ``hashes`` that this group has, or returns why it cannot."""
        if self._travel is None:
            return _LENDS_NONE
        return self._travel.lend(hashes, borrower_format=borrower_format)

    def lend_kept(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | None:
        """Lends ``hashes`` if host memory has them all, else returns ``None``. Can be called from
        any thread, also during a step. Later steps take the loan's slots back."""
        if self._travel is None:
            return None
        return self._travel.lend_kept(hashes, borrower_format=borrower_format)

    def lend_most_useful(self, num_bytes: int) -> Loan | str:
        """Lends up to ``num_bytes`` of the most requested blocks, each with all blocks before it in
        its chain, or returns why it cannot."""
        return (
            _LENDS_NONE if self._travel is None else self._travel.loans.lend_most_useful(num_bytes)
        )

    def take_in(
        self, hashes: BlockHashes, parents: Items[BlockHash | None], source: PeerSource
    ) -> None:
        """Starts pulling blocks of any chains from ``source`` into the cache. Parents must precede
        children. Raises QueueFull: too many blocks are already being pulled."""
        if self._travel is not None:
            self._travel.pulls.take_in(hashes, parents, source)

    @property
    def _num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._entrance)

    def _begin_check(self, audit: Audit) -> None:
        """Called when the engine is idle: schedules a block to be recomputed and compared."""
        seq = audit.next(eos_token_ids=self._model.eos_token_ids)
        if seq is not None:
            self._sequences[seq.request.request_id] = seq
            self._scheduler.add(seq)

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

    def _run_copies(self) -> None:
        """Finishes the steps under way, then runs a step that only copies blocks."""
        assert self._travel is not None
        while self._under_way:
            self._take_tokens()
        with self._failing():
            self._executor.submit(self._inputs.build(NOTHING, self._travel.submitted()))
            self._executor.result()
        self._travel.finished()

    def _settle(self) -> None:
        """If no request is left, waits for the steps under way and drops their outputs."""
        while self._under_way and not self._sequences:
            self._take_tokens()

    def _let_in(self) -> list[TokenDelta]:
        """Queues the requests whose constraint, adapter and blocks are ready. Ends those that were
        refused, and returns their last outputs."""
        scheduler = self._scheduler
        is_idle = not (self._under_way or scheduler.running or scheduler.num_waiting)
        ready, refused = self._entrance.take(
            is_idle=is_idle, num_pending_tokens=scheduler.num_pending_prefill_tokens
        )
        for seq in ready:
            scheduler.add(seq)
        ended = []
        for seq, error in refused:
            seq.status = Status.FINISHED
            ended.append(self._outcomes.fail(seq, error))
        return ended

    def _take_tokens(self) -> list[TokenDelta]:
        """Waits for the oldest step under way and returns its outputs."""
        with self._failing():
            result = self._executor.result()
        schedule = self._under_way.popleft()
        self._counters.num_steps += bool(schedule.sequences)
        if self._travel is not None:
            self._travel.finished()
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


_LENDS_NONE = "this group's blocks do not leave its KV cache"
