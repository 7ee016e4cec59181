"""Random requests, aborts and resets on small engines, with and without steps that run ahead:
every token equals what the prompt alone gives, every count adds up, and nothing is left behind."""

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.examples import examples
from tests.prepared import prepared

from quire.worker.blocks.events import BlockContent, BlockEvent, BlocksRemoved, BlocksStored
from quire.worker.blocks.hashing import BlockHash, TokenIds, as_token_ids, hash_blocks, root_hash
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.group_engine import GroupEngine
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.step.messages import StepInput

VOCAB_SIZE = 50
EOS = 1
MakeEngine = Callable[..., tuple[GroupEngine, Any]]
Generate = Callable[..., tuple[list[int], str]]


class Spec(NamedTuple):
    """A request to send. Prompts share prefixes, and are often equal."""

    trunk: tuple[int, ...]
    tail: list[int]
    params: SamplingParams
    num_resumed: int
    salt: str
    adapter: str
    priority: int


ADAPTERS = ("red", "green", "blue")
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([5, 1, 2, 3, 8, 13, 30, 60]),
    seed=st.sampled_from([0, 0, 1]),
    min_tokens=st.sampled_from([0, 1]),
    ignore_eos=st.booleans(),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
)
SPECS = st.builds(
    Spec,
    trunk=st.builds(
        lambda words, length: (words * 12)[:length],
        st.sampled_from([(5, 6, 7, 8), (5, 6, 9)]),
        st.sampled_from([8, 3, 4, 12, 15, 16, 17, 24, 32]),
    ),
    tail=st.lists(st.integers(0, 3), max_size=2),
    params=PARAMS,
    num_resumed=st.sampled_from([0, 0, 1, 6]),
    salt=st.sampled_from(["", "", "", "tenant"]),
    adapter=st.sampled_from(["", "", *ADAPTERS]),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, make_engine: MakeEngine, generate: Generate) -> None:
        super().__init__()
        self.make_engine = make_engine
        self.generate = generate
        self.num_added = 0
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.to_score: dict[str, list[int]] = {}
        self.received: dict[str, list[int]] = {}
        self.replayed: set[BlockHash] = set()
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.contents: dict[BlockHash, BlockContent] = {}

    @initialize(
        block_size=st.sampled_from([4, 4, 8, 16]),
        num_slots=st.sampled_from([16, 32, 48, 64, 96]),
        max_num_seqs=st.integers(1, 8),
        extra_tokens=st.integers(0, 40),
        caching=st.sampled_from([True, True, False]),
        num_ahead=st.sampled_from([0, 1]),
        policy=st.sampled_from(["shortest_prefill", "fcfs"]),
        guesses_wrong_at=st.sampled_from([None, 0, 2, 5]),
        max_scored=st.sampled_from([256, 7]),
        max_loras=st.sampled_from([1, 2, 3]),
        remembers=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_slots: int,
        max_num_seqs: int,
        extra_tokens: int,
        caching: bool,
        num_ahead: int,
        policy: str,
        guesses_wrong_at: int | None,
        max_scored: int,
        max_loras: int,
        remembers: bool,
    ) -> None:
        self.num_ahead = num_ahead
        self.guesses_wrong_at = guesses_wrong_at
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("quire.worker.parts.drafts.guess", self.guess)
        self.patch.setattr("quire.worker.engine.scheduler.MAX_SCORED_TOKENS", max_scored)
        self.block_size = block_size
        self.engine, self.executor = self.make_engine(
            block_size=block_size,
            num_blocks=num_slots // block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            enable_prefix_caching=caching,
            num_ahead=num_ahead,
            scheduling_policy=policy,
            speculation=guesses_wrong_at is not None,
            enable_lora=True,
            kv_events=remembers and caching,
            max_loras=max_loras,
            read_adapter=lambda _: Mock(),
        )
        self.max_loras = max_loras
        for adapter in ADAPTERS:  # Otherwise a thread reads them, some steps later.
            self.engine.check_request(prepared("adapter", [2], adapter=adapter, max_tokens=1))
        self.executor.on_execute = self.its_blocks_are_held
        self.max_num_seqs, self.max_num_tokens = max_num_seqs, max_num_seqs + extra_tokens
        self.engine.events.subscribe(self.replay)

    def guess(self, token_ids: TokenIds, *, max_tokens: int) -> list[int]:
        """Draft tokens: the right ones, except at every ``guesses_wrong_at``-th place."""
        for prompt, (output, _) in zip(self.prompts.values(), self.expected.values(), strict=True):
            known = [*prompt, *output]
            if known[: len(token_ids)] == token_ids.tolist():
                drafted = known[len(token_ids) :][:max_tokens]
                wrong = self.guesses_wrong_at
                return [
                    (token + 1) % VOCAB_SIZE if wrong and place % wrong == 0 else token
                    for place, token in enumerate(drafted, len(token_ids))
                ]
        return [0] * max_tokens

    @rule(burst=st.lists(SPECS, min_size=1, max_size=4))
    def add(self, burst: list[Spec]) -> None:
        for spec in burst:
            self.add_one(spec)

    def add_one(self, spec: Spec) -> None:
        prompt, params = [*spec.trunk, *spec.tail], spec.params
        output, reason = self.generate(
            prompt,
            max_tokens=params.max_tokens,
            seed=params.seed,
            stop=() if params.ignore_eos else (EOS,),
            banned=(EOS,),
            min_tokens=params.min_tokens,
            adapter=spec.adapter,
        )
        request = prepared(
            f"r{self.num_added}",
            prompt,
            sampling=params,
            resumed_token_ids=as_token_ids(output[: spec.num_resumed]),
            cache_salt=spec.salt,
            adapter=spec.adapter,
            priority=spec.priority,
            source=self.source(),
        )
        num_tokens = len(prompt) + (params.max_tokens or 0)
        fits = len(prompt) >= 1 and num_tokens <= self.engine.max_model_len
        try:
            self.engine.add_request(request)
        except InvalidRequest:
            assert not fits
            return
        assert fits
        self.num_added += 1
        self.expected[request.request_id] = (output, reason)
        self.prompts[request.request_id] = prompt
        if params.prompt_logprobs is not None and not spec.num_resumed:
            self.to_score[request.request_id] = prompt[1:]
        self.received[request.request_id] = output[: spec.num_resumed]
        self.learn_chain([*prompt, *output], spec.salt, spec.adapter)

    def source(self) -> PeerSource | None:
        """A group that has blocks of a request's chain; none here."""
        return None

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for output in self.engine.step():
                self.receive(output)

    @precondition(lambda self: self.expected)
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        request_id = sorted(self.expected)[choice % len(self.expected)]
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        del self.expected[request_id], self.prompts[request_id]
        self.to_score.pop(request_id, None)

    @rule()
    def reset_prefix_cache(self) -> None:
        is_reset = self.engine.reset_prefix_cache()
        assert is_reset == (self.engine.stats().num_held_blocks == 0)
        assert is_reset or self.engine.has_work

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.engine.stats()
        total = stats.num_free_blocks + stats.num_cached_blocks + stats.num_held_blocks
        assert total == stats.num_total_blocks
        assert stats.num_running + stats.num_waiting <= len(self.expected)
        assert self.engine.has_work or not self.expected
        assert 0 <= stats.num_hit_tokens <= stats.num_prompt_tokens
        assert stats.num_pending_prefill_tokens >= stats.num_waiting
        if self.num_ahead == 0:
            assert self.engine.has_work == bool(self.expected)
        if not self.engine.has_work or (self.num_ahead == stats.num_running == 0):
            assert stats.num_held_blocks == stats.num_wasted_slots == 0

    @invariant()
    def a_step_keeps_to_its_limits(self) -> None:
        for step in self.executor.steps:
            assert len(step.seq_lens_B) <= self.max_num_seqs
            assert len(step.token_ids_T) <= self.max_num_tokens
            assert all(0 <= slot < self.max_loras for slot, _ in step.adapter_loads)
        self.executor.steps.clear()

    @invariant()
    def events_replay_to_what_is_stored(self) -> None:
        assert set(self.engine.events.snapshot().snapshot or ()) == set(self.replayed)

    @invariant()
    def what_stored_blocks_hold_is_remembered_and_no_more(self) -> None:
        contents = self.engine.events.contents
        assert contents is None or contents == {name: self.contents[name] for name in self.replayed}

    @invariant()
    def no_chain_is_cut_in_its_middle(self) -> None:
        for block_hash in self.replayed:
            parent = self.parents[block_hash]
            assert parent is None or parent in self.replayed

    def its_blocks_are_held(self, step: StepInput) -> None:
        lengths = -(-step.seq_lens_B // self.block_size)
        tables = [step.block_tables_BM[row, :length] for row, length in enumerate(lengths)]
        assert self.engine.stats().num_held_blocks >= len(np.unique(np.concatenate(tables)))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self.run_to_the_end()
        finally:
            self.patch.undo()

    def run_to_the_end(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step(1)
            self.counts_add_up()
        assert not self.expected, "a request never ended"
        stats = self.engine.stats()
        assert (stats.num_held_blocks, stats.num_pending_prefill_tokens) == (0, 0)
        assert stats.num_cached_blocks == len(self.replayed)

    def receive(self, output: TokenDelta) -> None:
        received = self.received[output.request_id]
        assert output.token_offset == len(received)
        received += output.token_ids
        scored = [each.token_id for each in output.prompt_logprobs]
        assert scored == self.to_score.pop(output.request_id, [])
        tokens, reason = self.expected[output.request_id]
        assert received == tokens[: len(received)]
        if output.finish_reason is not None:
            assert (received, output.finish_reason) == (tokens, reason)
            self.forget(output.request_id)

    def replay(self, _: int, event: BlockEvent) -> None:
        match event:
            case BlocksStored(hashes):
                assert self.replayed.isdisjoint(hashes)
                self.replayed |= set(hashes)
            case BlocksRemoved(hashes):
                assert self.replayed.issuperset(hashes)
                self.replayed -= set(hashes)

    def learn_chain(self, tokens: list[int], salt: str, adapter: str) -> None:
        root = root_hash(
            model_fingerprint="hash-1",
            kv_dtype="float32",
            block_size=self.block_size,
            cache_salt=salt,
            adapter=adapter,
        )
        parent: BlockHash | None = None
        array = np.array(tokens, dtype=np.uint32)
        size = self.block_size
        for index, block_hash in enumerate(hash_blocks(array, block_size=size, root=root)):
            token_ids = array[index * size : (index + 1) * size].tobytes()
            self.contents[block_hash] = BlockContent(parent, token_ids, adapter, salt)
            self.parents[block_hash] = parent
            parent = block_hash


def test_tokens_depend_on_prompt_parameters_and_seed_only(
    make_engine: MakeEngine, generate: Generate
) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(make_engine, generate),  # type: ignore[arg-type]
        settings=settings(max_examples=examples(100), stateful_step_count=25, deadline=None),
    )
