"""What was sent where, against a list of it for each group."""

from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import strategies as st

from quire.router.config import RoutingConfig
from quire.router.directory import GroupId
from quire.router.policies.prefix_memory import PrefixMemory
from quire.router.table import RoutingTable
from quire.worker.hashing import BlockHash

GROUPS = [GroupId(name) for name in "abcde"]
CHAINS = [tuple(BlockHash(bytes([first, i]) * 16) for i in range(4)) for first in range(3)]
steps = st.tuples(
    st.sampled_from(GROUPS), st.none() | st.tuples(st.sampled_from(CHAINS), st.integers(0, 4))
)


@given(steps=st.lists(steps, max_size=30), max_blocks=st.sampled_from([None, 3, 6]))
def test_it_knows_what_was_sent_to_the_groups_that_are_still_there(
    steps: list[tuple[GroupId, tuple[tuple[BlockHash, ...], int] | None]], max_blocks: int | None
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
        sent[group] = (others + list(reversed(blocks)))[-(max_blocks or 100) :]
    for hashes in CHAINS:
        lengths = []
        for group in GROUPS:
            known = [block in sent.get(group, []) for block in hashes]
            lengths.append(known.index(False) if False in known else len(known))
        assert memory.lengths(hashes, GROUPS) == lengths
    assert [memory.num_blocks(group) for group in GROUPS] == [
        len(sent.get(group, [])) for group in GROUPS
    ]


def test_a_group_that_comes_back_is_not_thought_to_hold_what_it_was_sent_before(
    blocks: Callable[[Iterable[object]], tuple[BlockHash, ...]],
) -> None:
    """Where prefixes match nothing, this policy takes the group that was sent the least."""
    table = RoutingTable(block_size=16, config=RoutingConfig(policy="ray_prefix"))
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
