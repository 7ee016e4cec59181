"""Trace files: each format with a few lines, and the errors of invalid files."""

from pathlib import Path

import pytest

from quire.simulate.trace_files import load_trace
from quire.worker.request.errors import ConfigError

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1100, "output_length": 0, "hash_ids": [7, 8, 9]}
{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [7, 4]}
"""
LOG = """\
{"arrival_s": 0.5, "num_prompt_tokens": 40, "num_output_tokens": 3, "blocks": ["a", ["a", 1]]}
{"arrival_s": 2.0, "num_prompt_tokens": 40, "num_output_tokens": 3, "blocks": ["a", "b"]}
{"arrival_s": 3.0, "num_prompt_tokens": 40, "num_output_tokens": 3}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_mooncake_trace_begins_at_0_and_names_full_blocks_only(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "t.jsonl", MOONCAKE))
    assert (trace.block_size, trace.arrival_ms) == (512, [0.0, 2000.0])
    assert [len(chain) for chain in trace.chains] == [1, 2]
    assert trace.chains[0] == trace.chains[1][:1]
    # A request without output still has its first token.
    assert trace.num_output == [5, 1]


def test_a_log_of_ones_own_shares_what_it_names_alike(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "t.jsonl", LOG), format="log")
    first, second, third = trace.chains
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert third == ()
    assert trace.arrival_ms == [0.0, 1500.0, 2500.0]


def test_prefixes_for_azure_are_made_up_the_same_each_time(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", AZURE)
    trace = load_trace(path)
    assert trace.arrival_ms == pytest.approx([0.0, 4314.579])
    assert trace.num_output == [44, 109]
    for chain, num_input in zip(trace.chains, trace.num_input, strict=True):
        assert len(chain) == num_input // 64
    assert load_trace(path) == trace


def test_a_wrong_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "t.jsonl", MOONCAKE + '{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"request 3, read as mooncake: it has no 'input_length'"):
        load_trace(path)
    endless = '{"timestamp": 1, "input_length": Infinity, "output_length": 1, "hash_ids": []}\n'
    with pytest.raises(ConfigError, match=r"request 1, read as mooncake: cannot convert .* infin"):
        load_trace(write(tmp_path, "endless.jsonl", endless))
    with pytest.raises(ConfigError, match="request 3, read as azure: field larger than"):
        load_trace(write(tmp_path, "wide.csv", AZURE + '"' + "x" * 200_000 + '",3,4\n'))
    with pytest.raises(ConfigError, match="say its format, which is one of mooncake, azure, log"):
        load_trace(write(tmp_path, "t.txt", MOONCAKE))
    with pytest.raises(ConfigError, match="No such file or directory; give the path of a trace"):
        load_trace(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="no requests; one per line is needed"):
        load_trace(write(tmp_path, "empty.jsonl", ""))


def test_speeds_and_spreads_keep_the_requests(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "t.jsonl", LOG), format="log")
    assert trace.at_speed(2).arrival_ms == [0.0, 750.0, 1250.0]
    assert trace.first(2).chains == trace.chains[:2]
    spread = trace.spread(seed=1, within_ms=1000)
    assert sorted(spread.chains) == sorted(trace.chains)
    assert spread == trace.spread(seed=1, within_ms=1000) != trace.spread(seed=2, within_ms=1000)
