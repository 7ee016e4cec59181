"""`quire bench reuse` tells which tokens did not come from the place that it measures."""

from types import SimpleNamespace

import pytest

from quire import demo_model
from quire.cluster.tools.bench.reuse import ReuseConfig, _found
from quire.worker.request.config import EngineConfig
from quire.worker.request.outputs import Fetched


@pytest.mark.parametrize(
    ("on_disk", "cached", "told"),
    [
        (1008, 1008, ""),
        (976, 1024, "only 976 of 1024 tokens came from there; 48 were still in the KV cache"),
        (976, 976, "only 976 of 1024 tokens came from there; 0 were still in the KV cache"),
    ],
)
def test_tokens_of_the_kv_cache_are_told_from_those_that_are_lost(
    on_disk: int, cached: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = EngineConfig(model=demo_model.PATH)
    config = ReuseConfig(engine=engine, lengths=(1024,), repeats=1, seed=0, vocab_size=100)
    first = SimpleNamespace(fetched=Fetched(num_disk_tokens=on_disk), num_cached_tokens=cached)
    _found(first, "num_disk_tokens", 1024, config)
    assert capsys.readouterr().err.startswith(told)
