"""Tables of runs, in Markdown: medians over the rounds, a line per case."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median

from bench.report import markdown
from bench.serving.case import Case
from bench.serving.figures import num_unlike
from bench.serving.runs import Record

_COLUMNS = (
    "hits",
    "TTFT mean",
    "p50",
    "p90",
    "p99",
    "TPOT",
    "tokens/s",
    "balance",
    "error",
    "failed",
    "mean ÷",
)


def tables(records: Sequence[Record], *, reference: str) -> Iterator[str]:
    """``mean ÷`` is the ``reference`` line's mean TTFT over the line's, in the same rounds."""
    cases = [Case(**record["case"]) for record in records]
    pairs = sorted(zip(cases, records, strict=True), key=lambda pair: pair[0].title)
    for title, group in groupby(pairs, key=lambda pair: pair[0].title):
        here = list(group)
        by_label: dict[str, list[Record]] = {}
        for case, record in here:
            by_label.setdefault(case.label, []).append(record)
        yield f"## {title}\n"
        lines = [
            _line(label, mine, by_label.get(reference, [])) for label, mine in by_label.items()
        ]
        yield markdown(("policy", "runs", *_COLUMNS), lines) + "\n"
        num_requests, num_different = num_unlike([record["rows"] for _, record in here])
        yield (
            f"{num_requests} requests were answered by several runs; "
            f"{num_different} of them not with the same tokens by all."
        )
        others = [record["machine"]["others_cores"] for _, record in here if record.get("machine")]
        if others:
            yield (
                f"Others' work on the machine took {median(others):.2f} cores in the middle one of "
                f"{len(others)} runs, {max(others):.2f} at most."
            )
        yield ""


def progress(case: Case, round_: int, record: Record) -> str:
    values = record["values"]
    if "hit_rate" not in values:
        return f"round {round_}, {case.label}: all {values['num_failed']} failed"
    return (
        f"round {round_}, {case.label}: hits {values['hit_rate']:.1%}, TTFT mean "
        f"{1000 * values['ttft_mean_s']:.1f} p50 {1000 * values['ttft_p50_s']:.1f} p99 "
        f"{1000 * values['ttft_p99_s']:.1f} ms, TPOT {1000 * values['tpot_mean_s']:.2f} ms, "
        f"{values['requests_per_s']:.1f} requests/s, balance {values['balance']:.2f}, "
        f"{values['num_requests']:.0f} sent, {values['num_failed']:.0f} failed, "
        f"{values['duration_s']:.1f} s"
    )


def _line(label: str, mine: Sequence[Record], reference: Sequence[Record]) -> list[str]:
    def middle(name: str) -> float:
        return median(float(record["values"].get(name, 0.0)) for record in mine)

    def ms(name: str) -> str:
        return f"{1000 * middle(name):.1f}"

    return [
        label,
        str(len(mine)),
        f"{100 * middle('hit_rate'):.1f} %",
        *(ms(f"ttft_{name}_s") for name in ("mean", "p50", "p90", "p99")),
        f"{1000 * middle('tpot_mean_s'):.2f}",
        f"{middle('output_tokens_per_s'):.0f}",
        f"{middle('balance'):.2f}" if middle("balance") else "",
        f"{100 * middle('prediction_error'):.1f} %",
        f"{sum(record['values']['num_failed'] for record in mine):.0f}",
        _ratio(mine, reference),
    ]


def _ratio(mine: Sequence[Record], reference: Sequence[Record]) -> str:
    """The median over rounds of the ratio within a round, from the least to the most."""
    theirs = {record["round"]: record["values"]["ttft_mean_s"] for record in reference}
    ratios = [
        theirs[record["round"]] / record["values"]["ttft_mean_s"]
        for record in mine
        if record["round"] in theirs and "ttft_mean_s" in record["values"]
    ]
    if not ratios:
        return ""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
