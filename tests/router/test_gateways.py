"""Routing by several gateways that see each other's requests only in the groups' frames."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest

from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import BlockHash

Blocks = Callable[[Iterable[object]], tuple[BlockHash, ...]]

GROUPS = [GroupId(f"g{number}") for number in range(8)]
NUM_TOKENS = 1030
STEP_TOKENS = 2000


@dataclass
class Burst:
    """Requests and tokens that each group received."""

    num_requests: dict[GroupId, int]
    num_tokens: dict[GroupId, int]
    """Tokens that a group must compute, since no earlier request brought them."""

    @property
    def most_tokens(self) -> int:
        return max(self.num_tokens.values())

    @property
    def most_requests(self) -> int:
        return max(self.num_requests.values())


def burst(
    prompts: Sequence[Sequence[BlockHash]], *, num_gateways: int, requests_per_frame: int = 10**9
) -> Burst:
    """Sends prompts to the gateways in turn; groups end a step each ``requests_per_frame``."""
    tables = [RoutingTable(block_size=16, clock=lambda: 0.0) for _ in range(num_gateways)]
    for table in tables:
        table.update_members(GROUPS)
    found = Burst(dict.fromkeys(GROUPS, 0), dict.fromkeys(GROUPS, 0))
    pending = dict.fromkeys(GROUPS, 0)
    held: dict[GroupId, set[BlockHash]] = {group: set() for group in GROUPS}
    for number, prompt in enumerate(prompts, 1):
        table = tables[number % num_gateways]
        group = table.route(str(number), hashes=prompt, num_prompt_tokens=NUM_TOKENS).group
        missing = NUM_TOKENS - 16 * len(held[group].intersection(prompt))
        held[group].update(prompt)
        found.num_requests[group] += 1
        found.num_tokens[group] += missing
        pending[group] += missing
        if number % requests_per_frame == 0:
            for group in GROUPS:
                pending[group] = max(pending[group] - STEP_TOKENS, 0)
                load = GroupLoad(
                    num_running=found.num_requests[group],
                    num_waiting=0,
                    num_pending_prefill_tokens=pending[group],
                    num_available_blocks=10_000,
                )
                for table in tables:
                    table.update_load(group, load)
    return found


@pytest.mark.parametrize("requests_per_frame", [10**9, 16])
def test_different_prompts_spread_as_with_one_gateway(
    requests_per_frame: int, blocks: Blocks
) -> None:
    prompts = [blocks((number, i) for i in range(64)) for number in range(160)]
    one, four = (
        burst(prompts, num_gateways=count, requests_per_frame=requests_per_frame)
        for count in (1, 4)
    )
    assert one.most_requests == 20
    # Measured: 1.00 times before any frame, 1.10 with frames that take requests for granted.
    assert four.most_requests <= 1.15 * one.most_requests
    assert four.most_tokens <= 1.15 * one.most_tokens


@pytest.mark.parametrize(("requests_per_frame", "factor"), [(10**9, 4.0), (16, 1.5)])
def test_equal_prompts_make_no_groups_queue_much_longer(
    requests_per_frame: int, factor: float, blocks: Blocks
) -> None:
    prompt = blocks(range(64))
    one, four = (
        burst([prompt] * 160, num_gateways=count, requests_per_frame=requests_per_frame)
        for count in (1, 4)
    )
    # All gateways choose the same group for a prefix that nobody has, and each spills over when
    # its own share is as long as one gateway's whole queue would be: four times as late in
    # requests, which are cheap there, until frames show them. Measured: 3.2 and 1.3 times.
    assert four.most_requests <= factor * one.most_requests
    # In tokens to compute, for which requests wait, 1.23 and 1.05 times were measured.
    assert four.most_tokens <= 1.3 * one.most_tokens
    # The prefix is computed no more often than with one gateway.
    assert sum(four.num_tokens.values()) <= sum(one.num_tokens.values())
