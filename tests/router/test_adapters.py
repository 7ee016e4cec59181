"""Requests of a LoRA adapter go where it is loaded, and adapters are spread over groups."""

from collections.abc import Callable, Iterable
from typing import Any

from quire.router.policies.decide import decide
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Decision, GroupLoad, GroupState, RouteRequest
from quire.router.policies.prefix_aware import PrefixAware
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import BlockHash

A, B = GroupId("a"), GroupId("b")
DIGESTS = [f"{number:064x}" for number in range(64)]


def route(adapter: str, *groups: GroupState) -> Decision:
    asked = RouteRequest(hashes=(), num_prompt_tokens=100, block_size=16, adapter=adapter)
    return decide(PrefixAware(), asked, Loads(groups), [0] * len(groups))


def state(group: GroupId, *adapters: str, **numbers: Any) -> GroupState:
    return GroupState(group=group, adapters=frozenset(adapters), max_adapters=8, **numbers)


def test_an_adapter_is_asked_for_where_it_is_loaded() -> None:
    for here, there in ((A, B), (B, A)):
        decision = route(DIGESTS[0], state(here, DIGESTS[0]), state(there, DIGESTS[1]))
        assert (decision.group, decision.reason) == (here, "loaded_adapter")
        costs = {each.group: each.adapter_cost for each in decision.candidates}
        assert costs[here] == 0
        assert (costs[there] or 0) > 0
    without = route("", state(A, DIGESTS[0]), state(B))
    assert [each.adapter_cost for each in without.candidates] == [None, None]


def test_a_queue_outweighs_the_loading_of_an_adapter() -> None:
    busy = state(A, DIGESTS[0], num_pending_prefill_tokens=1000)
    assert route(DIGESTS[0], busy, state(B)).group == B


def test_one_more_adapter_goes_where_a_place_is_left() -> None:
    full = state(A, *DIGESTS[:8], num_adapters=8, num_running=8)
    free = state(B, *DIGESTS[8:12], num_adapters=4, num_running=12)
    assert route(DIGESTS[20], full, free).group == B
    # Without free slots anywhere, the group with the adapter loaded adds no turn.
    assert route(DIGESTS[0], full, state(B, num_adapters=8, num_running=8)).group == A


def test_a_cold_adapter_has_a_home_whatever_its_prompts(
    blocks: Callable[[Iterable[object]], tuple[BlockHash, ...]],
) -> None:
    homes = set()
    for digest in DIGESTS:
        chosen = set()
        for prompt in range(5):
            asked = RouteRequest(
                hashes=blocks((digest, prompt, place) for place in range(3)),
                num_prompt_tokens=50,
                block_size=16,
                adapter=digest,
            )
            groups = Loads([state(A), state(B)])
            chosen.add(decide(PrefixAware(), asked, groups, [0, 0]).group)
        assert len(chosen) == 1
        homes |= chosen
    assert homes == {A, B}


def test_requests_under_way_keep_their_adapter_until_they_end() -> None:
    table = RoutingTable(block_size=16)
    table.update_members([A, B])

    def ask(name: str, adapter: str) -> GroupId:
        return table.route(name, hashes=(), num_prompt_tokens=20, adapter=adapter).group

    home = ask("first", DIGESTS[0])
    assert ask("second", DIGESTS[0]) == home
    (there,) = [each for each in table.states() if each.group == home]
    assert there.adapters == {DIGESTS[0]}
    assert there.num_adapters == 1
    for name in ("first", "second"):
        table.completed(name)
    assert not any(each.adapters for each in table.states())
    loaded = frozenset(DIGESTS[3:5])
    frame = GroupLoad(
        num_running=0,
        num_waiting=0,
        num_pending_prefill_tokens=0,
        adapters=loaded,
        num_adapters=1,
        max_adapters=8,
    )
    table.update_load(B, frame)
    assert ask("third", DIGESTS[4]) == B
    (found,) = table.explain("third")
    assert found.decision.reason == "loaded_adapter"
