"""The gRPC client (`quire.v1.Inference`): requests streams from gateways and checks each chunk.

A stream ends with an error if a chunk does not continue the ones before it, if a chunk follows the
finish, or if there is no finish.
"""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from bench.serving.load import Stream

from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

_FINISHES = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORT: "abort",
}


class Gateways:
    """gRPC connections to gateways; requests take them in turn.

    Channels to one address have connections of their own: where several gateways share a port,
    the kernel deals these out among them.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        num_channels: int = 1,
        metadata: Sequence[tuple[str, str]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Opens ``num_channels`` channels to each address."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
            for _ in range(num_channels)
            for address in addresses
        ]
        self._stubs = [InferenceStub(channel) for channel in self._channels]
        self._metadata = tuple(metadata)
        self._num_sent = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for channel in self._channels:
            await channel.close(grace=None)

    async def send(self, stream: Stream) -> None:
        request = stream.request
        token_ids = None if request.text else pb.TokenIds(ids=request.token_ids)
        message = pb.GenerateRequest(
            model=request.model,
            token_ids=token_ids,
            text=request.text or None,
            sampling=pb.SamplingParams(
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=request.seed,
                ignore_eos=not request.may_stop,
                structured_outputs=pb.Constraint(**request.form) if request.form else None,
            ),
            cache_salt=request.cache_salt,
        )
        stub = self._stubs[self._num_sent % len(self._stubs)]
        self._num_sent += 1
        stream.sent_s = time.monotonic()
        call = stub.Generate(message, timeout=request.deadline_s, metadata=self._metadata)
        try:
            async for chunk in call:
                _take(stream, chunk)
                if stream.error is not None or _is_to_be_cancelled(stream):
                    break
            else:
                if not stream.finish:
                    stream.error = f"the stream ended after {len(stream.tokens)} tokens, unfinished"
        except grpc.aio.AioRpcError as error:
            stream.error = f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()
            stream.ended_s = time.monotonic()


def _take(stream: Stream, chunk: pb.GenerateResponse) -> None:
    now_s = time.monotonic()
    if stream.finish:
        stream.error = f"a chunk came after the finish ({stream.finish})"
        return
    if chunk.HasField("start"):
        stream.group = chunk.start.routing.group
        stream.num_cached_tokens = chunk.start.num_cached_tokens
        stream.num_predicted_tokens = chunk.start.routing.predicted_cached_tokens
    if chunk.token_offset != len(stream.tokens):
        stream.error = f"token {chunk.token_offset} came, expected {len(stream.tokens)}"
        return
    stream.tokens.extend(chunk.token_ids)
    stream.times.extend([now_s] * len(chunk.token_ids))
    stream.finish = _FINISHES.get(chunk.finish_reason, "")


def _is_to_be_cancelled(stream: Stream) -> bool:
    limit = stream.request.cancel_after
    if limit is None or len(stream.tokens) < limit or stream.finish:
        return False
    stream.finish = "cancelled"
    return True
