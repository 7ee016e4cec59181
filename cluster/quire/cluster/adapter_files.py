"""The two files of a LoRA adapter on their way between a gateway and a group's node.

An adapter is known by the digest of its content alone. Its files travel in pieces, and the
receiving store computes the digest again before it keeps them.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from quire.v1 import group_pb2 as pb
from quire.worker.api.errors import AdapterError

FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_BYTES = 4 * 2**30
"""The most that both files may have together."""
_PIECE_BYTES = 2**20
_PIECE_TIMEOUT_S = 30.0
"""Between two pieces that are received."""


class AdapterStore(Protocol):
    """The adapters that a node keeps on its disk, as `quire.worker.model.adapters.store` does."""

    def receiving(self) -> AbstractContextManager[Path]:
        """An empty folder in which to put both files for `keep`; gone when the context ends."""

    def keep(self, unfinished: Path, *, expected: str | None = None) -> str:
        """Takes them into the store, which may take long; returns their digest. Raises
        AdapterError."""

    def folder(self, digest: str) -> Path | None:
        """Where an adapter's files are; ``None`` if it is not kept."""


async def pieces_of(folder: Path, digest: str) -> AsyncIterator[pb.AdapterPiece]:
    """The files in ``folder``, one after the other. Raises OSError."""
    for name in FILES:
        with await asyncio.to_thread((folder / name).open, "rb") as file:
            while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield pb.AdapterPiece(digest=digest, file=name, data=data)


async def keep_pieces(pieces: AsyncIterator[pb.AdapterPiece], store: AdapterStore) -> None:
    """Puts the adapter that ``pieces`` bring into ``store``.

    Raises:
        AdapterError: They are too large, of no adapter, cannot be kept, or are not what their
            digest says.
    """
    with store.receiving() as folder:
        digest = await _write(pieces, folder)
        await asyncio.to_thread(partial(store.keep, folder, expected=digest))


async def _write(pieces: AsyncIterator[pb.AdapterPiece], folder: Path) -> str:
    """Writes the files; returns what their digest is said to be."""
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
