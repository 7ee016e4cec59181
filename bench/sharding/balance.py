"""How evenly real prompts and their blocks fall on shards: by the root alone, and with what begins
too many of them kept by every shard."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from quire.router.sharding import ShardMap
from quire.router.simulate.shards import Sharding
from quire.router.simulate.trace import Trace
from quire.router.simulate.trace_files import load_trace

TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl",
    "multitenant": "multitenant_like.jsonl",
    "azure": "AzureLLMInferenceTrace_conv_2023.csv",
}
SHARD_COUNTS = (4, 16, 64)


def measure(folder: Path) -> Iterator[dict[str, float | str]]:
    """What the fullest shard has, over the mean."""
    for name, file in TRACES.items():
        if not (folder / file).exists():
            continue
        trace = load_trace(folder / file)
        prompts = Counter(chain[0] for chain in trace.chains if chain)
        for num_shards in SHARD_COUNTS:
            by_root = ShardMap(num_shards=num_shards)
            spread = Sharding.of(trace, num_shards=num_shards).map
            row: dict[str, float | str] = {
                "trace": name,
                "num_shards": num_shards,
                "num_blocks": len({block for chain in trace.chains for block in chain}),
                "num_roots": len(prompts),
                "hottest_root": max(prompts.values()) / len(trace),
                "num_spread": len(spread.spread),
            }
            for what, shard_map in (("root", by_root), ("spread", spread)):
                row[f"{what}_look_ups"], row[f"{what}_blocks"] = _excess(trace, shard_map)
            yield row


def _excess(trace: Trace, shard_map: ShardMap) -> tuple[float, float]:
    look_ups: Counter[int] = Counter()
    blocks: dict[bytes, int | None] = {}
    for number, chain in enumerate(trace.chains):
        shard, num_spread = shard_map.shard_of(chain), shard_map.num_spread(chain)
        # Any shard may be asked of what all keep: they are in turn.
        look_ups[number % shard_map.num_shards if shard is None else shard] += 1
        for position, block in enumerate(chain):
            blocks[block] = None if position < num_spread else shard
    held = Counter(shard for shard in blocks.values() if shard is not None)
    num_spread = sum(shard is None for shard in blocks.values())
    counts = [held[shard] + num_spread for shard in range(shard_map.num_shards)]
    mean_look_ups = len(trace) / shard_map.num_shards
    return max(look_ups.values()) / mean_look_ups, max(counts) / (len(blocks) / len(counts))
