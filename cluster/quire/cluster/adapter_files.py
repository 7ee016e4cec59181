"""The two files of a LoRA adapter on their way between a gateway and a group's node.

An adapter is known by the digest of its content alone. Its files travel in pieces, and the
receiving store computes the digest again before it keeps them.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, Protocol

from quire.v1 import group_pb2 as pb
from quire.worker.api.errors import InvalidRequest

FILES = ("adapter_config.json", "adapter_model.safetensors")
MAX_BYTES = 4 * 2**30
"""Of both together."""
_PIECE_BYTES = 2**20
_PIECE_TIMEOUT_S = 30.0
"""Between two pieces that are received."""


class AdapterStore(Protocol):
    """The adapters that a node keeps on its disk. Its calls may take long: not for an event loop,
    but for ``folder``."""

    def put(self, folder: Path) -> str:
        """Keeps the adapter in ``folder``; returns its digest."""

    def folder(self, digest: str) -> Path | None:
        """Where its files are; ``None`` if it is not kept."""


async def pieces_of(folder: Path, digest: str) -> AsyncIterator[pb.AdapterPiece]:
    """The files in ``folder``, one after the other. Raises OSError."""
    for name in FILES:
        with await asyncio.to_thread((folder / name).open, "rb") as file:
            while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
                yield pb.AdapterPiece(digest=digest, file=name, data=data)


async def keep_pieces(pieces: AsyncIterator[pb.AdapterPiece], store: AdapterStore) -> None:
    """Puts the adapter that ``pieces`` bring into ``store``.

    Raises:
        InvalidRequest: They are too large, of no adapter, or their content has another digest.
    """
    with tempfile.TemporaryDirectory(prefix="quire-adapter-") as temporary:
        folder, digest, num_bytes = Path(temporary), "", 0
        files: dict[str, BinaryIO] = {}
        try:
            while (piece := await _next(pieces)) is not None:
                digest, num_bytes = digest or piece.digest, num_bytes + len(piece.data)
                if piece.file not in FILES or piece.digest != digest or num_bytes > MAX_BYTES:
                    raise InvalidRequest(
                        f"adapter {digest}: a piece of {piece.file!r} that brings "
                        f"{num_bytes} bytes; there are {' and '.join(FILES)} of at most "
                        f"{MAX_BYTES} bytes together"
                    )
                if piece.file not in files:
                    files[piece.file] = (folder / piece.file).open("wb")
                await asyncio.to_thread(files[piece.file].write, piece.data)
        finally:
            for file in files.values():
                file.close()
        kept = await asyncio.to_thread(store.put, folder) if files else ""
    if kept != digest or not digest:
        raise InvalidRequest(f"adapter {digest or 'without a digest'}: its content has {kept!r}")


async def _next(pieces: AsyncIterator[pb.AdapterPiece]) -> pb.AdapterPiece | None:
    try:
        async with asyncio.timeout(_PIECE_TIMEOUT_S):
            return await anext(pieces, None)
    except TimeoutError:
        raise InvalidRequest(f"no piece of an adapter came for {_PIECE_TIMEOUT_S:g} s") from None
