"""The audit recomputes a sample of blocks that this engine did not compute, and detects errors."""

from typing import Any

import numpy as np
import pytest
from tests.prepared import prepared

from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers import audit
from quire.worker.parts.tiers.checksum import checksum_of


@pytest.fixture
def engine(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose cache holds one prompt and whose host memory keeps evicted blocks."""
    monkeypatch.setattr(audit, "EVERY_REQUESTS", 1)
    return make_engine(num_blocks=24, host_kv_bytes=128 * 96, kv_offloading_size=64 * 96 / 2**30)


def run(engine: GroupEngine, request_id: str, tokens: Any) -> list[int]:
    request = prepared(request_id, tokens, max_tokens=4, ignore_eos=True)
    engine.add_request(request)
    out: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.request_id == request_id
            out += delta.token_ids
    return out


PROMPTS = [[begin + place % 40 for place in range(64)] for begin in (1, 5, 9)]


def test_a_block_from_host_memory_is_computed_again_and_found_equal(engine: Any) -> None:
    engine, _ = engine
    first = [run(engine, f"a{place}", prompt) for place, prompt in enumerate(PROMPTS)]
    again = [run(engine, f"b{place}", prompt) for place, prompt in enumerate(PROMPTS)]
    assert first == again
    assert engine.stats().num_host_tokens > 0
    assert engine.audit.num_checked > 0
    assert engine.audit.num_wrong == 0
    assert engine.stats().num_held_blocks == 0


def test_a_wrong_block_is_dropped_with_all_behind_it(engine: Any, caplog: Any) -> None:
    engine, _ = engine
    first = [run(engine, f"a{place}", prompt) for place, prompt in enumerate(PROMPTS)]
    host_tier = engine.transfers.host_tier
    for slot in host_tier._slot_of.values():  # As a broken group would have computed them.
        tokens = engine.transfers.host_blocks_XC[slot].view(np.int64)[::3]
        tokens[:] = (tokens + 1) % 50
        host_tier.filled(slot, checksum_of(engine.transfers.host_blocks_XC[slot]))
    for number in range(20):
        run(engine, f"b{number}", PROMPTS[number % 3])
    assert engine.audit.num_wrong > 0
    assert engine.stats().num_corrupt_blocks == engine.audit.num_wrong
    assert "is not what the model computes" in caplog.text
    assert "from host memory" in caplog.text
    assert len(first) == 3
