"""Blocks on disk: every fault is detected, and the store never exceeds its bound."""

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.parts.tiers.disk_blocks import (
    FILE_BYTES,
    files,
    name,
    numbers,
    put,
    put_chain,
    read,
    store_in,
)

from quire.worker.parts.tiers import disk
from quire.worker.parts.tiers.disk import BlockCorrupt, DiskReadError, Put
from quire.worker.parts.tiers.disk_file import HEADER_BYTES
from quire.worker.request.errors import ConfigError


def fail_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def writev(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", writev)


def test_a_block_comes_back_and_a_chain_matches_as_far_as_it_goes(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1, 2, 3)
    put_chain(store, 1, 4)
    for number in (1, 2, 3, 4):
        assert name(number) in store
        read(store, number)
    assert store.match([name(n) for n in (1, 2, 3, 9)]) == 3
    assert store.match([name(n) for n in (9, 1)]) == 0
    assert store.num_bytes == 4 * FILE_BYTES
    parents = dict(store.blocks())
    assert parents == {name(1): None, name(2): name(1), name(3): name(2), name(4): name(1)}
    assert next(iter(parents)) == name(1)


def test_a_block_without_its_parent_is_refused(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert put(store, 2, parent=1).error == "its parent is not on disk"
    assert not files(tmp_path)


def test_ends_of_chains_make_room_the_least_recently_used_first(tmp_path: Path) -> None:
    store = store_in(tmp_path, num_blocks=4)
    put_chain(store, 1, 2)
    put_chain(store, 3, 4)
    read(store, 1)
    read(store, 2)
    assert numbers(put(store, 5).removed) == [4]
    assert numbers(put(store, 6).removed) == [3]
    assert numbers(put(store, 7).removed) == [2]
    assert numbers(put(store, 8).removed) == [1]
    assert sorted(files(tmp_path)) == [5, 6, 7, 8]


def test_a_parent_does_not_make_room_for_its_own_child(tmp_path: Path) -> None:
    store = store_in(tmp_path, num_blocks=2)
    put_chain(store, 1, 2)
    last = put(store, 3, parent=2)
    assert last == Put(error="kv_disk_size has no room for one block more")
    assert store.match([name(1), name(2)]) == 2


def test_a_restart_finds_the_blocks_and_the_order_of_their_use(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1, 2)
    put_chain(store, 3, 4)
    for age, number in enumerate((4, 3, 2, 1)):
        os.utime(files(tmp_path)[number], (1000 + age, 1000 + age))
    read(store, 4)  # The file's times must record this use.
    store.close()
    again = store_in(tmp_path, num_blocks=3)
    assert dict(again.blocks()) == {name(1): None, name(3): None, name(4): name(3)}
    read(again, 4)
    assert again.num_bytes == 3 * FILE_BYTES
    assert sorted(files(tmp_path)) == [1, 3, 4]


def test_a_restart_drops_what_has_lost_its_parent(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1, 2, 3)
    store.close()
    files(tmp_path)[2].unlink()
    again = store_in(tmp_path)
    assert numbers(block for block, _ in again.blocks()) == [1]
    assert list(files(tmp_path)) == [1]


def test_two_engines_have_a_slot_each_and_a_restarted_one_a_former_ones(tmp_path: Path) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    put_chain(first, 1)
    put_chain(second, 2)
    assert name(1) not in second
    first.close()
    third = store_in(tmp_path)
    read(third, 1)
    read(second, 2)


def test_files_of_another_model_count_and_go_first(tmp_path: Path) -> None:
    old = store_in(tmp_path, identity="another")
    put_chain(old, 1, 2)
    old.close()
    store = store_in(tmp_path, num_blocks=3)
    assert name(1) not in store
    assert store.num_bytes == 2 * FILE_BYTES
    put_chain(store, 1, 2, 3)
    assert store.num_bytes == 3 * FILE_BYTES
    assert len(list(tmp_path.glob("*/*/??/*-*"))) == 3
    for number in (1, 2, 3):
        read(store, number)


@pytest.mark.parametrize("at", [*range(HEADER_BYTES), HEADER_BYTES, HEADER_BYTES + 100, -1])
def test_one_flipped_bit_anywhere_is_found(at: int, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1, 2, 3)
    file = files(tmp_path)[2]
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(BlockCorrupt) as caught:
        read(store, 2)
    assert str(file) in str(caught.value)
    assert numbers(caught.value.removed) == [3, 2]
    assert list(files(tmp_path)) == [1]
    assert store.num_bytes == FILE_BYTES
    read(store, 1)
    put_chain(store, 1, 2)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda file, other: os.truncate(file, HEADER_BYTES + 5), "it has 129 bytes, not 380"),
        (lambda file, other: os.truncate(file, 0), "it has 0 bytes, not 380"),
        (lambda file, other: file.write_bytes(file.read_bytes() + b"x"), "it has 381 bytes"),
        (lambda file, other: file.write_bytes(other.read_bytes()), "its block is 00"),
        (lambda file, other: file.write_bytes(patched(file, 8, b"\x00")), "its version is 0"),
        (lambda file, other: file.write_bytes(patched(file, 12, b"\x03")), "num_layers is 3"),
        (lambda file, other: file.write_bytes(b"\0" * 380), "its magic is 0000000000000000"),
    ],
)
def test_a_damaged_file_says_how(damage: Any, what: str, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1, 2)
    put_chain(store, 3)
    damage(files(tmp_path)[2], files(tmp_path)[3])
    with pytest.raises(BlockCorrupt, match=what):
        read(store, 2)
    assert name(2) not in store


def patched(file: Path, at: int, new: bytes) -> bytes:
    data = file.read_bytes()
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_refuses_a_write_is_left_alone_for_a_while(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    store = store_in(tmp_path, num_blocks=2, clock=lambda: now_s)
    put_chain(store, 1)
    put_chain(store, 2)
    with monkeypatch.context() as faulty:
        fail_writes(faulty, number)
        failed = put(store, 3)
        assert os.strerror(number) in failed.error
        assert numbers(failed.removed) == [1]
        assert os.strerror(number) in store.why_not
        assert put(store, 4) == Put(error=store.why_not)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    read(store, 2)
    now_s = disk.RETRY_S
    assert not store.why_not
    assert not put(store, 3).error
    read(store, 3)
    assert store.num_bytes == 2 * FILE_BYTES
    assert not list(tmp_path.glob("*/*/unfinished/*"))


def test_a_folder_that_vanishes_costs_its_blocks_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = store_in(folder)
    put_chain(store, 1, 2)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(DiskReadError, match="cannot be read: No such file") as caught:
        read(store, 1)
    assert numbers(caught.value.removed) == [2, 1]
    assert "No such file" in put(store, 3).error
    assert not folder.exists()
    # An engine that later takes the same name keeps the folder.
    other = store_in(folder)
    assert not put(other, 4).error
    store._paused_until_s = 0
    assert "another engine has made a new folder" in put(store, 5).error
    assert list(files(folder)) == [4]


def test_subfolders_that_vanish_are_made_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1)
    for child in list((tmp_path / "0").iterdir()):
        if child.is_dir():
            child.rename(tmp_path / "elsewhere")
    put_chain(store, 2)
    read(store, 2)


def test_a_folder_that_cannot_be_used_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_disk_dir='.*file': .*name a folder"):
        store_in(tmp_path / "file")


def test_a_closed_store_writes_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.close()
    store.close()
    assert put(store, 1) == Put(error="the store is closed")


KILLED = """
import os, signal, sys
sys.path[:] = {path!r}
from pathlib import Path
from tests.worker.parts.tiers.disk_blocks import *
store = store_in(Path(sys.argv[1]))
put_chain(store, 1)
real = os.writev
def half(file, parts):
    real(file, [b"".join(parts)[:200]])
    os.kill(os.getpid(), signal.SIGKILL)
os.writev = half
put(store, 2, parent=1)
"""


def test_a_kill_in_the_middle_of_a_write_leaves_no_half_file(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED.format(path=sys.path), str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*/*/unfinished/*"))) == 1
    store = store_in(tmp_path)
    assert list(files(tmp_path)) == [1]
    assert not list(tmp_path.glob("*/*/unfinished/*"))
    read(store, 1)
    put_chain(store, 1, 2)


def test_a_child_of_a_block_that_turns_out_damaged_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    put_chain(store, 1)
    os.truncate(files(tmp_path)[1], 9)
    real = os.writev

    def read_meanwhile(*arguments: Any) -> int:
        with pytest.raises(BlockCorrupt):
            read(store, 1)
        return real(*arguments)

    monkeypatch.setattr(os, "writev", read_meanwhile)
    assert put(store, 2, parent=1).error == "its parent turned out damaged"
    assert not files(tmp_path)
    assert store.num_bytes == 0


def test_threads_that_write_and_read_at_once_see_whole_blocks(tmp_path: Path) -> None:
    store = store_in(tmp_path, num_blocks=12)
    errors: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(150):
            chain = int(rng.integers(1, 6))
            numbers = [chain, chain * 10, chain * 100, chain * 1000]
            for parent, number in zip((None, *numbers), numbers, strict=False):
                put(store, number, parent)
            try:
                read(store, numbers[int(rng.integers(0, 4))])
            except DiskReadError as error:
                if not isinstance(error, BlockCorrupt):
                    continue
                errors.append(str(error))
            except AssertionError:
                errors.append("wrong bytes")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.num_bytes <= 12 * FILE_BYTES
    assert sorted(files(tmp_path)) == sorted(numbers(block for block, _ in store.blocks()))
