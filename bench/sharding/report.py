"""Tables of what `python -m bench.sharding` measured."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def tables(rows: Iterable[Row]) -> str:
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(row["part"], []).append(row)
    blocks = [make(parts[part]) for part, make in _TABLES.items() if part in parts]
    return "\n\n".join(blocks) + "\n"


def _fill(rows: Sequence[Row]) -> str:
    lines = ["## Shards", ""]
    first = rows[0]
    lines += [
        f"{first['num_groups']:,} groups, {first['num_shards']} shards; times are CPU time. Bytes "
        "a block as the index counts them (and, of a process's first shard, as it grew).",
        "",
        "| shard | blocks | over the mean | chains | sets | bytes a block | M blocks a second | "
        "event of 512 blocks, µs: p50 / p99 / most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["shard"]):
        lines.append(
            f"| {row['shard']} | {row['num_blocks']:,} | {row['share']:.3f} | "
            f"{row['num_chains']:,} | {row['num_sets']:,} | {row['bytes_per_block']:.1f}"
            f"{_grown(row)} | {row['blocks_per_s'] / 1e6:.1f} | "
            f"{row['event_p50_us']:.0f} / {row['event_p99_us']:.0f} / {row['event_max_us']:,.0f} |"
        )
    lines += [
        "",
        f"All of them: {sum(row['num_blocks'] for row in rows):,} blocks, "
        f"{sum(row['num_holdings'] for row in rows):,} holdings.",
        "",
        "Look-ups in µs, p50 / p99, the median shard's; `system prompt` is 64 blocks that every "
        "group holds, and 936 that nobody does.",
        "",
        "| | 100 blocks | 1,000 | 8,000 | system prompt |",
        "|---|---|---|---|---|",
    ]
    asked = ("look_up_100", "look_up_1000", "look_up_8000", "head")
    for name, suffix in (("dict of groups", ""), ("array", "_array")):
        cells = []
        for ask in asked:
            p50, p99 = (
                statistics.median(row[f"{ask}{suffix}_{q}_us"] for row in rows)
                for q in ("p50", "p99")
            )
            cells.append(f"{p50:,.1f} / {p99:,.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for row in rows:
        if "refill_s" in row:
            lines += [
                "",
                f"Shard {row['shard']} after a restart, from {row['num_groups']:,} snapshots of "
                f"{row['refill_bytes'] / 1e9:.2f} GB: {row['refill_s']:.1f} s of CPU, "
                f"{row['refill_blocks_per_s'] / 1e6:.1f} M blocks a second; the longest that a "
                f"snapshot kept it from answering was {row['slowest_snapshot_ms']:.1f} ms.",
            ]
    return "\n".join(lines)


def _grown(row: Row) -> str:
    """Later shards take memory that the ones before gave back."""
    return f" ({row['rss_per_block']:.1f})" if "refill_s" in row else ""


def _balance(rows: Sequence[Row]) -> str:
    return "\n".join(
        [
            "## Balance",
            "",
            "What the fullest shard has, over the mean: look-ups / blocks.",
            "",
            "| trace | blocks | roots | prompts of the hottest | shards | by the root alone | "
            "hot beginnings spread | blocks spread |",
            "|---|---|---|---|---|---|---|---|",
            *(
                f"| {row['trace']} | {row['num_blocks']:,} | {row['num_roots']} | "
                f"{row['hottest_root']:.1%} | {row['num_shards']} | "
                f"{row['root_look_ups']:.2f} / {row['root_blocks']:.2f} | "
                f"{row['spread_look_ups']:.2f} / {row['spread_blocks']:.2f} | "
                f"{row['num_spread']} |"
                for row in rows
            ),
        ]
    )


def _preselect(rows: Sequence[Row]) -> str:
    full = {(r["trace"], r["num_groups"]): r for r in rows if not r["num_each"]}
    lines = [
        "## A decision over a few groups",
        "",
        "`k` is as many holders of the prompt, idle groups and groups at random; mean TTFT in s "
        "(and p99), beside the scan of all groups.",
        "",
        "| trace | groups | k | mean (p99) | mean ÷ that of the scan | hits | busiest ÷ mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["mean_s"] / full[row["trace"], row["num_groups"]]["mean_s"]
        lines.append(
            f"| {row['trace']} | {row['num_groups']:,} | {row['num_each'] or 'all'} | "
            f"{row['mean_s']:.4f} ({row['p99_s']:.3f}) | {ratio:.3f} | {row['hit_rate']:.1%} | "
            f"{row['balance']:.2f} |"
        )
    return "\n".join(lines)


_TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "fill": _fill,
    "balance": _balance,
    "preselect": _preselect,
}
