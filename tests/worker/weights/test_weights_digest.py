"""The digest of a checkpoint's weights covers every byte and is computed once."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import native_build
from quire.worker.model.read_facts import model_facts
from quire.worker.rank.executor import make_executor
from quire.worker.weights import digest as weights_digest
from quire.worker.weights.digest import DIGESTS_NAME, weight_digests

Hashed = list[list[str]]


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native_build, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two weight files, the first one longer than two chunks."""
    folder = tmp_path / "weights"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for name, size in (("a", 2 * weights_digest._CHUNK_BYTES + 5), ("b", 70_000)):
        values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        (folder / name).write_bytes(values.numpy().tobytes())
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Hashed:
    """Names of the hashed files, a list for each time that files were hashed."""
    calls: Hashed = []
    original = weights_digest._hash_files

    def count(files: list[Path], stamps: Any) -> dict[Path, str]:
        calls.append([file.name for file in files])
        return original(files, stamps)

    monkeypatch.setattr(weights_digest, "_hash_files", count)
    return calls


def digests(folder: Path) -> list[str]:
    return list(weight_digests(folder, (folder / "a", folder / "b")).values())


def flip_byte(file: Path, offset: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_one_changed_byte_among_millions_makes_another_model(
    tiny_llama: Path, tmp_path: Path, config_of: Callable[..., Any]
) -> None:
    copies = [Path(shutil.copytree(tiny_llama, tmp_path / name)) for name in ("one", "tuned")]
    for copy in copies:
        tensors = load_file(copy / "model.safetensors")
        tensors["unused"] = torch.zeros(4_000_000, dtype=torch.uint8)
        save_file(tensors, copy / "model.safetensors")
    one, same = (model_facts(config_of(copy)).fingerprint for copy in copies)
    assert one == same
    flip_byte(copies[1] / "model.safetensors", 3_000_001)
    assert model_facts(config_of(copies[1])).fingerprint != one


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.5, 1.0])
def test_every_byte_counts(folder: Path, name: str, place: float) -> None:
    before = digests(folder)
    flip_byte(folder / name, round(place * ((folder / name).stat().st_size - 1)))
    after = digests(folder)
    assert [old != new for old, new in zip(before, after, strict=True)] == [
        name == "a",
        name == "b",
    ]


def test_bytes_that_change_places_make_another_digest(folder: Path) -> None:
    before = digests(folder)
    chunk = weights_digest._CHUNK_BYTES
    content = (folder / "a").read_bytes()
    (folder / "a").write_bytes(content[chunk : 2 * chunk] + content[:chunk] + content[2 * chunk :])
    assert digests(folder)[0] != before[0]


def test_a_file_is_hashed_once(folder: Path, hashed: Hashed) -> None:
    assert digests(folder) == digests(folder)
    assert hashed == [["a", "b"]]


def test_models_in_one_folder_are_hashed_once_each(folder: Path, hashed: Hashed) -> None:
    for name in ("a", "b", "a"):
        weight_digests(folder, (folder / name,))
    assert hashed == [["a"], ["b"]]
    (folder / "a").unlink()
    flip_byte(folder / "b", 7)
    weight_digests(folder, (folder / "b",))
    assert [*json.loads((folder / DIGESTS_NAME).read_text())["files"]] == ["b"]


def test_a_changed_file_is_hashed_again_though_its_size_and_time_are_the_same(
    folder: Path, hashed: Hashed
) -> None:
    before = digests(folder)
    stat = (folder / "b").stat()
    flip_byte(folder / "b", 7)
    os.utime(folder / "b", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = digests(folder)
    assert (after[0], after[1] == before[1]) == (before[0], False)
    assert hashed == [["a", "b"], ["b"]]


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "",
        lambda content: content[: len(content) // 2],
        lambda content: "[" * 100_000,
        lambda content: json.dumps([content]),
        lambda content: json.dumps(json.loads(content) | {"files": 3}),
        lambda content: content.replace('"sha256": "', '"sha256": "0'),
    ],
    ids=["empty", "cut off", "deep", "a list", "no files", "another digest"],
)
def test_damaged_digests_are_computed_again(
    folder: Path, hashed: Hashed, damage: Callable[[str], str]
) -> None:
    before = digests(folder)
    kept = folder / DIGESTS_NAME
    kept.write_text(damage(kept.read_text()))
    assert digests(folder) == before
    assert len(hashed) == 2
    assert digests(folder) == before
    assert len(hashed) == 2, "the damaged ones were replaced"


def test_digests_of_a_folder_that_cannot_be_written_to_are_kept_with_the_user(
    folder: Path, user_cache: Path, hashed: Hashed
) -> None:
    (folder / DIGESTS_NAME).mkdir()  # Not even root can replace it by a file.
    assert digests(folder) == digests(folder)
    assert len(hashed) == 1
    assert not list((folder / DIGESTS_NAME).iterdir())
    (kept,) = (user_cache / "digests").iterdir()
    assert sorted(json.loads(kept.read_text())["files"]) == ["a", "b"]
    assert sorted(path.name for path in folder.iterdir()) == [DIGESTS_NAME, "a", "b"]


def test_those_that_start_together_wait_for_the_first(folder: Path, hashed: Hashed) -> None:
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(digests(folder))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(each == found[0] for each in found)
    assert hashed == [["a", "b"]]


def test_an_engine_whose_blocks_nobody_else_names_hashes_no_weights(
    tiny_llama: Path, config_of: Callable[..., Any], hashed: Hashed
) -> None:
    executor, facts = make_executor(config_of(tiny_llama))
    executor.close()
    assert (hashed, facts.fingerprint) == ([], "")
