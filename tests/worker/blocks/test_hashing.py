"""Block hashes against their definition in hashlib, with and without the native library."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.prepared import prepared

from quire.worker.blocks import native_hashing
from quire.worker.blocks.hashing import (
    BlockHash,
    BlockHashes,
    Feature,
    HashChain,
    hash_blocks,
    root_hash,
)
from quire.worker.request.model_card import ModelCard

ROOT = root_hash(model_fingerprint="m", kv_dtype="f", block_size=16)
CARD = ModelCard(
    model="name",
    model_fingerprint="m",
    kv_dtype="f",
    block_size=16,
    max_model_len=99,
    vocab_size=99,
    numerics="",
)


@pytest.fixture(params=["native", "hashlib"], autouse=True)
def _implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "hashlib":
        monkeypatch.setattr(native_hashing, "library", lambda: None)
    elif native_hashing.library() is None:
        pytest.skip("no C++ compiler, or a CPU without SHA instructions")


def by_definition(tokens: np.ndarray, block_size: int) -> list[BlockHash]:
    data = ROOT + bytes(32) + tokens.astype("<u4").tobytes()
    return [
        BlockHash(hashlib.sha256(data[: 64 + 4 * end]).digest())
        for end in range(block_size, len(tokens) + 1, block_size)
    ]


@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 12, 16, 32, 64, 128, 512])
@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 700, 2048])
def test_a_name_is_the_hash_of_all_up_to_its_block(block_size: int, num_tokens: int) -> None:
    tokens = np.random.default_rng(num_tokens).integers(0, 2**32, num_tokens, dtype=np.uint32)
    expected = by_definition(tokens, block_size)
    assert list(hash_blocks(tokens, block_size=block_size, root=ROOT)) == expected


@pytest.mark.parametrize("block_size", [3, 4, 8, 16, 32])
def test_a_chain_can_be_made_bit_by_bit(block_size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**32, 500, dtype=np.uint32)
    chain = HashChain(ROOT, block_size=block_size)
    names: list[BlockHash] = []
    for end in [0, 1, 7, 40, 41, 200, 200, 201, 499, 500]:
        names += chain.extend(tokens[:end])
        assert chain.num_blocks == len(names) == end // block_size
    assert names == by_definition(tokens, block_size)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5), st.slices(5))
def test_block_hashes_are_a_sequence_of_names(names: list[bytes], part: slice) -> None:
    hashes = BlockHashes(b"".join(names))
    assert (len(hashes), list(hashes)) == (len(names), names)
    assert hashes == names
    assert hashes == tuple(names)
    assert hashes == BlockHashes.of(hashes) == BlockHashes.of(map(BlockHash, names))
    assert [hashes[i] for i in range(-len(names), len(names))] == names + names
    if part.step in (None, 1):
        assert hashes[part] == names[part]
    with pytest.raises(IndexError):
        hashes[len(names)]


def test_what_cannot_be_names_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes: not a multiple of 32"):
        BlockHashes(bytes(33))
    with pytest.raises(ValueError, match="step=2"):
        BlockHashes(bytes(96))[::2]


def test_a_root_that_is_no_name_and_blocks_without_tokens_are_refused() -> None:
    for root, block_size in ((ROOT + b"x", 16), (ROOT[:31], 16), (ROOT, 0), (ROOT, -16)):
        with pytest.raises(ValueError, match=f"root of {len(root)} bytes, {block_size=}"):
            HashChain(BlockHash(root), block_size=block_size)


def test_a_library_whose_structure_has_another_size_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if native_hashing.library() is None:
        pytest.skip("no library on this machine")
    monkeypatch.setattr(native_hashing, "CHAIN_BYTES", native_hashing.CHAIN_BYTES - 8)
    with pytest.raises(RuntimeError, match=r"Chain has 104 bytes in chain.cpp, 96 here"):
        native_hashing._load()


def test_names_of_tokens_alone_never_change() -> None:
    root = root_hash(
        model_fingerprint="m", numerics="n", kv_dtype="f", block_size=16, cache_salt="s"
    )
    names = hash_blocks(np.arange(40, dtype=np.uint32), block_size=16, root=root)
    assert [name.hex()[:16] for name in names] == ["0e64fc60515bd423", "3f6cf0e5339d6443"]


@pytest.mark.parametrize("begin", [0, 5, 16, 31, 47])
@pytest.mark.parametrize("block_size", [3, 4, 16])
def test_a_features_content_changes_the_names_from_its_first_token_on(
    begin: int, block_size: int
) -> None:
    tokens = np.arange(100, dtype=np.uint32)

    def names(*digests: bytes) -> list[BlockHash]:
        features = [
            Feature(begin=begin + number, num_tokens=1, digest=digest)
            for number, digest in enumerate(digests)
        ]
        chain = HashChain(ROOT, block_size=block_size, features=features)
        return [*chain.extend(tokens[:40]), *chain.extend(tokens)]

    num_before = begin // block_size
    kinds = [names(), names(b"c" * 32), names(b"d" * 32), names(b"c" * 32, b"d" * 32)]
    assert all(kind[:num_before] == kinds[0][:num_before] for kind in kinds)
    assert len({kind[num_before] for kind in kinds[:3]}) == 3
    assert len({name for kind in kinds for name in kind[num_before + 1 :]}) == sum(
        len(kind[num_before + 1 :]) for kind in kinds
    )


def test_a_feature_is_told_from_tokens_by_its_definition() -> None:
    tokens, digest = np.arange(8, dtype="<u4"), bytes(range(32))
    chain = HashChain(ROOT, block_size=8, features=[Feature(begin=3, num_tokens=2, digest=digest)])
    data = tokens[:3].tobytes() + b"\xff" * 16 + digest + tokens[3:].tobytes()
    assert chain.extend(tokens)[0] == hashlib.sha256(ROOT + bytes(32) + data).digest()


@pytest.mark.parametrize("wrong", [{"digest": b"short"}, {"num_tokens": 0}])
def test_what_is_no_feature_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be 32, 1 up"):
        Feature(**{"begin": 0, "num_tokens": 1, "digest": bytes(32), **wrong})


def test_groups_of_other_numerics_share_no_block() -> None:
    plain = prepared("r", range(64))
    other = replace(CARD, numerics="others")
    assert not set(plain.hashed_for(CARD).hashes) & set(plain.hashed_for(other).hashes)


def test_requests_that_differ_in_adapter_or_salt_share_no_block() -> None:
    plain = prepared("r", range(64))
    kinds = [plain, replace(plain, adapter="a"), replace(plain, adapter="b")]
    kinds += [replace(plain, cache_salt="a"), replace(plain, adapter="a", cache_salt="a")]
    names = [each.hashed_for(CARD).hashes for each in kinds]
    assert len({name for each in names for name in each}) == sum(map(len, names)) == 5 * 4
    assert names[0] == hash_blocks(plain.prompt_token_ids, block_size=16, root=ROOT)
