"""The names of cached blocks: SHA-256 over everything that determines their KV.

``h_i = SHA256(root + tokens_0 + … + tokens_i)``: a block's name is the hash of the whole prefix
that ends with it. The hash begins with a root that covers the model, the KV dtype, the block size,
the adapter and the tenant's salt. If tokens are placeholders for other content, such as an image,
the digest of that content precedes the first of them. Blocks of equal names hold equal KV, and
nobody can construct a collision to be served another tenant's cache. Engine, gateway and directory
all use these functions, so that a name means the same everywhere.

The hash covers the prefix and not the previous name: the compression that continues the chain and
the one that finishes a name are then independent, and the CPU overlaps them. 16,000 tokens in
blocks of 16 take 35 µs, half of what ``SHA256(h_{i-1} + tokens_i)`` takes.
"""

import ctypes
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NewType, overload

import numpy as np
import numpy.typing as npt

from quire.worker.blocks import native_hashing

BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the name of a full block, which covers all tokens up to its end."""

HASH_BYTES = 32

TokenIds = npt.NDArray[np.uint32]

_FEATURE_MARK = b"\xff" * 16
"""Precedes a feature's digest among the tokens; no vocabulary has these ids. Mark and digest keep
the bytes of a block a multiple of `native_hashing.BLOCK_BYTES_MULTIPLE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Content other than text, such as an image, that placeholder tokens in a prompt represent.

    Raises:
        ValueError: The digest has a wrong length, or the content has no placeholder token.
    """

    begin: int
    """The position in the prompt of the first placeholder token."""
    num_tokens: int
    digest: bytes
    """SHA-256 of the content as the model receives it, and of its shape."""

    def __post_init__(self) -> None:
        if len(self.digest) != HASH_BYTES or self.num_tokens < 1:
            raise ValueError(
                f"digest of {len(self.digest)} bytes, num_tokens={self.num_tokens}: must be "
                f"{HASH_BYTES}, 1 up"
            )


class BlockHashes(Sequence[BlockHash]):
    """Block names in one buffer, ``data``, instead of one object for each block."""

    __slots__ = ("data",)

    def __init__(self, data: bytes = b"") -> None:
        """Raises ValueError if ``data`` is not a whole number of names."""
        if len(data) % HASH_BYTES:
            raise ValueError(f"block hashes of {len(data)} bytes: not a multiple of {HASH_BYTES}")
        self.data = data

    @classmethod
    def of(cls, hashes: Iterable[BlockHash]) -> "BlockHashes":
        return hashes if isinstance(hashes, cls) else cls(b"".join(hashes))

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> "BlockHashes": ...
    def __getitem__(self, index: int | slice) -> "BlockHash | BlockHashes":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"step={step}: block hashes are sliced without steps")
            return BlockHashes(self.data[start * HASH_BYTES : stop * HASH_BYTES])
        begin = range(len(self))[index] * HASH_BYTES
        return BlockHash(self.data[begin : begin + HASH_BYTES])

    def __iter__(self) -> Iterator[BlockHash]:
        names: list[BlockHash] = np.frombuffer(self.data, dtype=f"V{HASH_BYTES}").tolist()
        return iter(names)

    def __eq__(self, other: object) -> bool:
        """Equal to a list or tuple of the same names, too."""
        if isinstance(other, BlockHashes):
            return self.data == other.data
        return isinstance(other, list | tuple) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"BlockHashes({', '.join(name[:4].hex() for name in self)})"


class HashChain:
    """Names the blocks of one sequence as they fill."""

    def __init__(
        self, root: BlockHash, *, block_size: int, features: Sequence[Feature] = ()
    ) -> None:
        """``features`` are those of the sequence, in order. Raises ValueError if ``root`` is not 32
        bytes or ``block_size`` is below 1."""
        if len(root) != HASH_BYTES or block_size < 1:
            raise ValueError(
                f"root of {len(root)} bytes, {block_size=}: must be {HASH_BYTES}, 1 up"
            )
        self.root = root
        self.num_blocks = 0
        """Blocks named so far."""
        self._block_size = block_size
        self._features = deque(features)  # Those behind the named blocks.
        self._block_bytes = 4 * block_size
        first_chunk = root.ljust(native_hashing.CHUNK_BYTES, b"\0")
        self._native = native_hashing.library()
        if self._native is None or self._block_bytes % native_hashing.BLOCK_BYTES_MULTIPLE:
            self._native = None
            self._state = hashlib.sha256(first_chunk)
        else:
            self._chain = ctypes.create_string_buffer(native_hashing.CHAIN_BYTES)
            self._native.quire_chain_begin(self._chain, first_chunk)

    def extend(self, token_ids: TokenIds) -> BlockHashes:
        """Names the full blocks of ``token_ids``, the whole sequence, that have no name yet.

        A partial last block gets no name.
        """
        tokens = np.ascontiguousarray(token_ids, dtype="<u4")
        size, end = self._block_size, len(tokens) // self._block_size
        names = b""
        while self.num_blocks < end:
            begin = self.num_blocks * size
            plain_end = min(end, self._features[0].begin // size) if self._features else end
            if plain_end > self.num_blocks:
                names += self._extend(
                    tokens[begin:], self._block_bytes, plain_end - self.num_blocks
                )
                self.num_blocks = plain_end
            else:
                block = self._with_features(tokens[begin : begin + size])
                names += self._extend(block, block.nbytes, 1)
                self.num_blocks += 1
        return BlockHashes(names)

    def _with_features(self, tokens: TokenIds) -> TokenIds:
        """The next block's ``tokens``, with the features that begin among them."""
        parts: list[TokenIds] = []
        done = 0
        begin = self.num_blocks * self._block_size
        while self._features and self._features[0].begin < begin + self._block_size:
            feature = self._features.popleft()
            mark = np.frombuffer(_FEATURE_MARK + feature.digest, dtype="<u4")
            parts += [tokens[done : feature.begin - begin], mark]
            done = feature.begin - begin
        return np.concatenate([*parts, tokens[done:]])

    def _extend(self, tokens: TokenIds, block_bytes: int, num_blocks: int) -> bytes:
        if self._native is not None:
            data = bytes(num_blocks * HASH_BYTES)  # Written in place; nobody else has it yet.
            self._native.quire_chain_extend(
                self._chain, tokens.ctypes.data, block_bytes, num_blocks, data
            )
            return data
        names, buffer = [], tokens.data.cast("B")
        for begin in range(0, num_blocks * block_bytes, block_bytes):
            self._state.update(buffer[begin : begin + block_bytes])
            names.append(self._state.copy().digest())
        return b"".join(names)


def root_hash(
    *,
    model_fingerprint: str,
    numerics: str = "",
    kv_dtype: str,
    block_size: int,
    adapter: str = "",
    cache_salt: str = "",
) -> BlockHash:
    """The hash that begins every chain of one model, tenant and adapter. It covers everything but
    the tokens that the bytes of a block depend on.

    The fields are encoded with their names, so that no salt is confused with an adapter's name.
    """
    fields = {
        "adapter": adapter,
        "block_size": block_size,
        "cache_salt": cache_salt,
        "kv_dtype": kv_dtype,
        "model": model_fingerprint,
        "numerics": numerics,
    }
    return BlockHash(hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest())


def hash_blocks(token_ids: TokenIds, *, block_size: int, root: BlockHash) -> BlockHashes:
    """The names of all full blocks of ``token_ids``. A partial last block has no name."""
    return HashChain(root, block_size=block_size).extend(token_ids)


def as_token_ids(token_ids: Sequence[int] | TokenIds) -> TokenIds:
    """``token_ids`` as one contiguous array of uint32, the form in which they are hashed."""
    return np.ascontiguousarray(token_ids, dtype=np.uint32)
