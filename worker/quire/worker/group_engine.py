"""The engine with all of its parts, as a replica group and `quire.llm.LLM` run it."""

import time
from collections.abc import Callable, Sequence

from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.engine.engine import Engine
from quire.worker.engine.part import Host, Part, Parts
from quire.worker.engine.scheduler import short_step
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.adapters.part import Adapters
from quire.worker.parts.adapters.reading import Read, reader
from quire.worker.parts.constraints.edits import choices_of
from quire.worker.parts.constraints.part import Constraints
from quire.worker.parts.drafts import Drafts, speculates
from quire.worker.parts.tiers.arriving import Arriving
from quire.worker.parts.tiers.audit import Audit
from quire.worker.parts.tiers.loan import Loan
from quire.worker.parts.tiers.part import Tiers
from quire.worker.parts.tiers.pull import Fetch
from quire.worker.parts.tiers.transfers import Transfers, make_transfers, num_tiers
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import Executor
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer


class GroupEngine(Engine):
    """An `Engine` with the parts that ``config`` asks for.

    ``load_tokenizer`` is called in a thread for the first request with a constraint; by default it
    loads the tokenizer of ``config.model``. ``read_adapter`` finds and checks an adapter in a
    thread; by default it reads the node's store. ``fetch`` runs transfers from other groups.
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
        self._fetch = fetch
        self.constraints = Constraints(
            Grammars(
                load_tokenizer or (lambda: Tokenizer.load(config.model)),
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
            )
        )
        self.lora: Adapters | None = None
        if config.enable_lora:
            self.lora = Adapters(
                read_adapter or reader(config),
                max_kept=config.num_kept_loras,
                num_slots=config.max_loras,
            )
        self.tiers: Tiers | None = None
        self.audit: Audit | None = None
        super().__init__(
            config,
            model,
            executor,
            clock=clock,
            epoch=epoch,
            num_tiers=num_tiers(config),
            make_parts=lambda host: self._make_parts(host, config, model, executor),
        )

    def _make_parts(
        self, host: Host, config: EngineConfig, model: ModelFacts, executor: Executor
    ) -> Parts:
        every: list[Part] = [self.constraints]
        if self.lora is not None:
            every.append(self.lora)
        transfers = make_transfers(host, config, model, executor, fetch=self._fetch)
        if transfers is not None:
            arriving = Arriving(
                transfers,
                block_size=config.block_size,
                step_tokens=short_step(config.max_num_batched_tokens),
                is_idle=host.is_idle,
                clock=host.clock,
            )
            self.tiers = Tiers(transfers, arriving, host)
            self.audit = Audit(
                transfers,
                host.pool,
                eos_token_ids=model.eos_token_ids,
                on_wrong=host.stop_naming,
            )
            every += [self.tiers, self.audit]
        drafts = None
        if speculates(config, executor):
            drafts = Drafts(max_num_batched_tokens=config.max_num_batched_tokens)
            every.append(drafts)
        return Parts(every=every, tier=self.tiers, drafting=drafts, choices_of=choices_of)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The digests of the adapters that are ready, the most recently used one last."""
        return () if self.lora is None else self.lora.reading.kept

    @property
    def transfers(self) -> Transfers | None:
        return None if self.tiers is None else self.tiers.transfers

    @property
    def arriving(self) -> Arriving | None:
        return None if self.tiers is None else self.tiers.arriving

    def lend(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | str:
        """Lends the longest prefix of ``hashes`` that this group has, or returns why it cannot."""
        if self.transfers is None:
            return _LENDS_NONE
        return self.transfers.lend(hashes, borrower_format=borrower_format)

    def lend_kept(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | None:
        """Lends ``hashes`` if host memory has them all, else returns ``None``. Can be called from
        any thread, also during a step. Later steps take the loan's slots back."""
        if self.transfers is None:
            return None
        return self.transfers.lend_kept(hashes, borrower_format=borrower_format)

    def lend_most_useful(self, num_bytes: int) -> Loan | str:
        """Lends up to ``num_bytes`` of the most requested blocks, each with all blocks before it in
        its chain, or returns why it cannot."""
        return (
            _LENDS_NONE
            if self.transfers is None
            else self.transfers.loans.lend_most_useful(num_bytes)
        )

    def take_in(
        self, hashes: BlockHashes, parents: Sequence[BlockHash | None], source: PeerSource
    ) -> None:
        """Starts pulling blocks of any chains from ``source`` into the cache. Parents must precede
        children. Raises QueueFull: too many blocks are already being pulled."""
        if self.transfers is not None:
            self.transfers.pulls.take_in(hashes, parents, source)


_LENDS_NONE = "this group's blocks do not leave its KV cache"
