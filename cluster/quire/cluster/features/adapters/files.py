"""Transfers the two files of a LoRA adapter between a gateway and a group's node.

An adapter is identified by the digest of its content alone. Its files travel in pieces, and the
receiving store computes the digest again before it keeps them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import AdapterError

FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_BYTES = 4 * 2**30
"""Maximum size of both files together."""
_PIECE_BYTES = 2**20
_PIECE_TIMEOUT_S = 30.0
"""Maximum time between two received pieces."""


class AdapterStore(Protocol):
    """Keeps adapters on a node's disk, as `quire.worker.parts.adapters.store` does."""

    def receiving(self) -> AbstractContextManager[Path]:
        """An empty folder in which to put both files for `keep`; removed when the context ends."""

    def keep(self, unfinished: Path, *, expected: str | None = None) -> str:
        """Moves the files in the folder ``unfinished`` into the store and returns their digest.
        May take long. Raises AdapterError."""

    def folder(self, digest: str) -> Path | None:
        """The folder with an adapter's files; ``None`` if it is not kept."""


async def pieces_of(folder: Path, digest: str) -> AsyncIterator[pb.AdapterPiece]:
    """Yields the pieces of both files in ``folder``, one file after the other. Raises OSError."""
    for name in FILES:
        with await asyncio.to_thread((folder / name).open, "rb") as file:
            while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield pb.AdapterPiece(digest=digest, file=name, data=data)


async def keep_pieces(pieces: AsyncIterator[pb.AdapterPiece], store: AdapterStore) -> None:
    """Puts the adapter whose files are in ``pieces`` into ``store``.

    Raises:
        AdapterError: The files are too large, are no adapter, cannot be kept, do not match their
            digest, or no piece came for `_PIECE_TIMEOUT_S`.
    """
    with store.receiving() as folder:
        digest = await _write(pieces, folder)
        await asyncio.to_thread(partial(store.keep, folder, expected=digest))


async def _write(pieces: AsyncIterator[pb.AdapterPiece], folder: Path) -> str:
    """Writes the files to ``folder``; returns the digest that the pieces state."""
    digest, num_bytes = "", 0
    files: dict[str, BinaryIO] = {}
    try:
        while (piece := await _next(pieces)) is not None:
            digest, num_bytes = digest or piece.digest, num_bytes + len(piece.data)
            if piece.file not in FILES or piece.digest != digest or num_bytes > MAX_BYTES:
                raise AdapterError(
                    f"adapter {digest}: a piece of {piece.file!r} that makes {num_bytes} bytes; "
                    f"must be of {' or '.join(FILES)}, {MAX_BYTES} bytes together at most"
                )
            if piece.file not in files:
                files[piece.file] = (folder / piece.file).open("wb")
            await asyncio.to_thread(files[piece.file].write, piece.data)
    except OSError as error:
        raise AdapterError(f"adapter {digest}: cannot be written: {error}") from error
    finally:
        for file in files.values():
            file.close()
    return digest


async def _next(pieces: AsyncIterator[pb.AdapterPiece]) -> pb.AdapterPiece | None:
    try:
        async with asyncio.timeout(_PIECE_TIMEOUT_S):
            return await anext(pieces, None)
    except TimeoutError:
        raise AdapterError(f"no piece of an adapter came for {_PIECE_TIMEOUT_S:g} s") from None
