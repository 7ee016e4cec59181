"""Baseline policies' memory of routed prompts, against a list for each group."""

import pickle
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.router.policies.loads import Loads
from quire.router.policies.policy import GroupState, RouteRequest
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.simulate import baselines
from quire.simulate.baselines import SIMULATED_POLICIES
from quire.simulate.prefix_memory import PrefixMemory
from quire.worker.blocks.hashing import BlockHash

GROUPS = [GroupId(name) for name in "abcde"]
CHAINS = [tuple(BlockHash(bytes([first, i]) * 16) for i in range(4)) for first in range(3)]
steps = st.tuples(
    st.sampled_from(GROUPS), st.none() | st.tuples(st.sampled_from(CHAINS), st.integers(0, 4))
)


@given(steps=st.lists(steps, max_size=30), max_blocks=st.sampled_from([100, 3, 6]))
def test_it_knows_what_was_sent_to_the_groups_that_are_still_there(
    steps: list[tuple[GroupId, tuple[tuple[BlockHash, ...], int] | None]], max_blocks: int
) -> None:
    memory, sent = PrefixMemory(max_blocks=max_blocks), dict[GroupId, list[BlockHash]]()
    for group, chain in steps:
        if chain is None:
            memory.drop(group)
            sent.pop(group, None)
            continue
        blocks = chain[0][: chain[1]]
        memory.add(blocks, group)
        others = [block for block in sent.get(group, []) if block not in blocks]
        sent[group] = (others + list(reversed(blocks)))[-max_blocks:]
    for hashes in CHAINS:
        lengths = []
        for group in GROUPS:
            known = [block in sent.get(group, []) for block in hashes]
            lengths.append(known.index(False) if False in known else len(known))
        assert memory.lengths(hashes, GROUPS) == lengths
    assert [memory.num_blocks(group) for group in GROUPS] == [
        len(sent.get(group, [])) for group in GROUPS
    ]


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("name", SIMULATED_POLICIES)
def test_a_policy_grows_no_more_with_prompts_that_it_has_not_seen(
    name: str,
    blocks: Callable[[Iterable[object]], tuple[BlockHash, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten times as many prompts take equally many bytes, except for digits. By then Preble's window
    of three minutes is full; this memory is full after a few prompts."""
    monkeypatch.setattr(baselines, "PrefixMemory", lambda max_blocks: PrefixMemory(max_blocks=60))
    policy = SIMULATED_POLICIES[name]()
    sizes = []
    for number in range(2000):
        request = RouteRequest(
            hashes=blocks((number, i) for i in range(4)),
            num_prompt_tokens=65,
            block_size=16,
            ordinal=number,
            now_s=float(number),
        )
        groups = Loads([GroupState(group=group) for group in GROUPS])
        costs = policy.costs(request, groups, np.zeros(len(GROUPS)))
        group = GROUPS[int(costs.argmin())]
        policy.routed(request, group)
        policy.finished(request, group)
        sizes.append(len(pickle.dumps(policy)))
    assert sizes[-1] <= 1.2 * sizes[200]


def test_a_group_that_comes_back_is_not_thought_to_hold_what_it_was_sent_before(
    blocks: Callable[[Iterable[object]], tuple[BlockHash, ...]],
) -> None:
    """Without a prefix match this policy takes the group that received the least."""
    table = RoutingTable(block_size=16, policy=SIMULATED_POLICIES["ray_prefix"]())
    table.update_members(GROUPS[:2])

    def route(name: str, num_blocks: int) -> GroupId:
        hashes = blocks((name, i) for i in range(num_blocks))
        return table.route(name, hashes=hashes, num_prompt_tokens=16 * num_blocks + 1).group

    most, least = route("long", 10), route("short", 5)
    assert most != least
    table.completed("long")
    table.update_members([least])
    table.update_members(GROUPS[:2])
    assert route("other", 3) == most
