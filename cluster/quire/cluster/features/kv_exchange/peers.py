"""A group's exchange of blocks with the other groups of its model: it lends and borrows them."""

import asyncio
import ssl

from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.cluster.features.kv_exchange.lending import Call, Lender, LendKept
from quire.cluster.features.kv_exchange.warming import Warming
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.kv_format import KvFormat


class Peers:
    """Combines lending, borrowing and warming. It is made inside an event loop.

    ``borrower`` serves the pulls of the engine behind ``call`` and ``lend_kept``. ``tls`` is the
    context of the group's gRPC port on ``host``.
    """

    def __init__(
        self,
        borrower: Borrower,
        call: Call,
        lend_kept: LendKept,
        *,
        format: KvFormat,
        host: str,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._borrower = borrower
        self._lender = Lender(call, lend_kept, format=format, host=host, tls=tls)
        self._warming = Warming(borrower, call, format=format)

    @property
    def num_loans(self) -> int:
        """Number of loans that were requested and have not ended."""
        return self._lender.num_loans

    async def lend(self, request: pb.BlocksRequest) -> pb.BlocksLoan:
        """Answers a `Blocks` call. Raises ValueError: its hashes are malformed."""
        return await self._lender.lend(request)

    async def warm(self, request: pb.WarmRequest) -> pb.WarmResponse:
        """Answers a `Warm` call."""
        return await self._warming.warm(request)

    async def close(self) -> None:
        """Ends all loans and pulls, within about two seconds."""
        self._warming.close()
        await asyncio.to_thread(self._lender.close)
        await self._borrower.close()
