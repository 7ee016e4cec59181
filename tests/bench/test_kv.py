"""`python -m bench.kv`: small runs pass its checks, and errors are detected."""

from pathlib import Path

import numpy as np
import pytest
from bench.kv.disk_faults import FILE_FAULTS, full_disk, noted
from bench.kv.disturb import disturb
from bench.kv.drain import drain
from bench.kv.equal import equal, places_of
from bench.kv.fault_report import Asked, Report
from bench.kv.faults import faults
from bench.kv.groups import Said
from bench.kv.prefill import prefill
from bench.kv.wire_faults import cuts
from tests.worker.parts.tiers.disk_blocks import files, name, put, put_chain, read, store_in

from quire.worker.parts.tiers.disk import DiskReadError
from quire.worker.request.outputs import Fetched


@pytest.mark.slow
def test_answers_are_equal_from_every_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert equal(num_requests=200, dtypes=["bfloat16"]) == 0
    assert "200 requests, 0 answers that differ" in capsys.readouterr().out


@pytest.mark.slow
def test_no_fault_changes_a_token_and_each_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults(num_requests=250) == 0
    told = capsys.readouterr().out
    assert "0 with wrong tokens" in told
    assert ", 0 not named" in told


@pytest.mark.slow
def test_decodes_are_timed_beside_pulls_and_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = disturb(
        shape="S", num_streams=2, rounds=2, window_s=0.3, cache=tmp_path, from_host=False
    )
    assert done == 0
    assert "2 pairs of windows" in capsys.readouterr().out


@pytest.mark.slow
def test_streams_that_move_say_the_same_with_blocks_and_without(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert drain(num_streams=6, num_tokens=256, rounds=1) == 0
    assert "tokens are equal" in capsys.readouterr().out


@pytest.mark.slow
def test_streams_of_prefill_groups_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefill(num_requests=60) == 0
    assert "| whole and equal | 60 |" in capsys.readouterr().out


def test_a_place_is_where_tokens_came_from() -> None:
    cases = {
        (0, 0, 0, 0): ["nowhere"],
        (64, 0, 0, 0): ["cache"],
        (64, 64, 0, 0): ["host"],
        (64, 16, 32, 0): ["cache", "host", "disk"],
        (64, 0, 0, 64): ["peer"],
    }
    for (num_cached, host, disk, peer), places in cases.items():
        fetched = Fetched(num_host_tokens=host, num_disk_tokens=disk, num_peer_tokens=peer)
        assert places_of(Said(((), ()), 0.0, fetched, num_cached)) == places


def test_a_report_fails_for_a_wrong_token_and_for_a_fault_that_nobody_named() -> None:
    asked = [
        Asked(kind="connection cut", seconds=seconds, computed_s=0.1) for seconds in (0.11, 0.114)
    ]
    assert [each.is_late for each in asked] == [False, True]
    report = Report(asked=asked)
    report.tally("connection cut").num_injected = 2
    report.tally("connection cut").num_named = 2
    assert not report.has_failed
    assert "2 requests, 0 with wrong tokens; 2 faults, 0 not named" in "\n".join(report.lines())
    report.tally("connection cut").unnamed.append("one")
    assert report.has_failed
    assert Report(wrong=["a token"]).has_failed


def test_a_fault_that_nobody_met_needs_no_name() -> None:
    report = Report()
    half = Fetched(num_disk_tokens=16)
    report.judge("stale file", half, is_met=False)
    assert (report.tally("stale file").num_unmet, report.has_failed) == (1, False)
    report.judge("stale file", half._replace(error="disk: block 1: its version is 0"))
    report.judge("stale file", half._replace(error="2 blocks came too late: …"), is_met=False)
    tally = report.tally("stale file")
    assert (tally.num_named, tally.num_given_up, tally.num_injected) == (1, 1, 2)
    report.judge("stale file", half)
    assert report.has_failed


@pytest.mark.parametrize("kind", FILE_FAULTS)
def test_a_damaged_file_meets_nobody_if_it_is_deleted_before_it_is_read(
    tmp_path: Path, kind: str
) -> None:
    harm, rng = FILE_FAULTS[kind], np.random.default_rng(0)
    store = store_in(tmp_path, num_blocks=4)
    put_chain(store, 1, 2)
    put_chain(store, 3, 4)
    harm(files(tmp_path)[2], files(tmp_path)[4], rng)
    put_chain(store, 5)  # Makes room by deleting block 2.
    with noted(store) as touched:
        assert store.match([name(1), name(2)]) == 1
        read(store, 1)
    assert touched.read == {name(1)}
    harm(files(tmp_path)[5], files(tmp_path)[3], rng)
    with noted(store) as touched, pytest.raises(DiskReadError):
        read(store, 5)
    assert touched.read == {name(5)}


def test_a_full_disk_meets_nobody_while_nothing_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1)
    with full_disk(store), noted(store) as touched:
        assert not put(store, 1).error  # It is on disk already.
        assert "no blocks are written to disk" not in caplog.text
        assert touched.num_writes == 0
        assert put(store, 2).error
    assert touched.num_writes == 1
    assert "no blocks are written to disk" in caplog.text
    assert not put(store, 2).error


def test_connections_are_cut_at_twenty_places() -> None:
    assert len(set(cuts(1000))) == 20
