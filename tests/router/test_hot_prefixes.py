"""The sketch of shared prefixes against exact counts of every prefix."""

import hashlib
import random
from collections import Counter

from quire.router.config import RoutingConfig
from quire.router.hot_prefixes import HotPrefix, HotPrefixes
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash, BlockHashes


def chain(*tokens: int) -> BlockHashes:
    """Hashes of a prompt in blocks of one token."""
    names = [
        BlockHash(hashlib.sha256(repr(tokens[: end + 1]).encode()).digest())
        for end in range(len(tokens))
    ]
    return BlockHashes.of(names)


def top(sketch: HotPrefixes, limit: int = 100) -> dict[BlockHash, HotPrefix]:
    return {each.name: each for each in sketch.top(limit, lambda name: ())}


def test_it_counts_as_many_hits_as_there_were_while_it_has_room() -> None:
    chance = random.Random(2)
    sketch, counts = HotPrefixes(), Counter[BlockHash]()
    for _ in range(300):
        prompt = chain(*(chance.randrange(2) for _ in range(chance.randint(0, 9))))
        sketch.saw(prompt)
        counts.update(prompt[depth - 1] for depth in (1, 2, 4, 8) if depth <= len(prompt))
    found = top(sketch)
    assert {name: each.num_hits for name, each in found.items()} == {
        name: hits for name, hits in counts.items() if hits > 1
    }


def test_a_prefix_follows_the_one_of_half_its_length() -> None:
    sketch, prompt = HotPrefixes(), chain(1, 2, 3, 4, 5)
    sketch.saw(prompt)
    sketch.saw(prompt)
    found = top(sketch)
    assert [found[prompt[depth - 1]].num_blocks for depth in (1, 2, 4)] == [1, 2, 4]
    assert found[prompt[0]].parent is None
    assert found[prompt[1]].parent == prompt[0]
    assert found[prompt[3]].parent == prompt[1]


def test_what_is_long_and_often_asked_for_comes_with_all_that_it_begins_with() -> None:
    sketch = HotPrefixes()
    for _ in range(3):
        sketch.saw(chain(*range(16)))
        sketch.saw(chain(99))
    assert [each.num_blocks for each in sketch.top(1, lambda name: ())] == [16, 8, 4, 2, 1]


def test_a_flood_of_prompts_that_nobody_shares_takes_no_more_room_and_drops_nothing_popular() -> (
    None
):
    sketch, popular = HotPrefixes(max_entries=64), chain(1, 2, 3, 4)
    for number in range(2000):
        sketch.saw(popular)
        sketch.saw(chain(1000 + number, 1, 2, 3, 4, 5, 6, 7))
        assert len(sketch) <= 64
    assert {popular[depth - 1] for depth in (1, 2, 4)} <= top(sketch).keys()


def test_a_table_names_the_groups_that_hold_a_prefix_now() -> None:
    table = RoutingTable(block_size=1, config=RoutingConfig())
    groups = [GroupId("a"), GroupId("b"), GroupId("c")]
    table.update_members(groups)
    prompt = chain(1, 2, 3)
    for group, blocks in ((groups[0], prompt), (groups[2], BlockHashes.of(prompt[:1]))):
        stored = BlocksStored(hashes=blocks)
        table.apply_events(group, EventBatch(epoch=1, first_seq=0, events=(stored,)))
    for number in range(2):
        table.route(str(number), hashes=prompt, num_prompt_tokens=3)
    found = {each.num_blocks: each.holders for each in table.hot_prefixes(10)}
    assert found == {1: ["a", "c"], 2: ["a"]}


def test_a_request_that_goes_on_elsewhere_is_counted_once() -> None:
    table = RoutingTable(block_size=1)
    table.update_members([GroupId("a")])
    for reason in ("", "the group was lost"):
        table.route("r", hashes=chain(1), num_prompt_tokens=1, moved_because=reason)
    assert table.hot_prefixes(10) == []
