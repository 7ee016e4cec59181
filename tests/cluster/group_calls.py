"""Calls that tests make to a group in place of a gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from tests.prepared import prepared

from quire.cluster.wire import tokens_to_bytes, work_of
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc


@asynccontextmanager
async def connect(group: Any) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(group.address) as channel:
        yield group_pb2_grpc.ReplicaGroupStub(channel)


def submit(
    name: str, prompt: list[int], *, resumed: list[int] | None = None, **sampling: Any
) -> Any:
    params = {"seed": 1, "max_tokens": 10, "ignore_eos": True, **sampling}
    return pb.GroupCommand(
        submit=pb.Submit(
            request_id=name,
            attempt=1,
            work=work_of(prepared("", prompt, **params)),
            resumed_token_ids=tokens_to_bytes(resumed or []),
        )
    )


async def read_deltas(call: Any, name: str) -> list[pb.TokenDelta]:
    """Reads frames until the request ended; returns its deltas."""
    deltas: list[pb.TokenDelta] = []
    while not deltas or not (deltas[-1].finish_reason or deltas[-1].HasField("error")):
        frame = await call.read()
        deltas += [delta for delta in frame.deltas if delta.request_id == name]
    return deltas


async def read_to_end(call: Any) -> None:
    while await call.read() != grpc.aio.EOF:
        pass


def tokens(deltas: list[pb.TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
