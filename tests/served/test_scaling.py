"""Groups scale under a real Ray Serve: from none, to none, and again."""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from tests.served.conftest import GROUPS_NAME

from quire.cluster.deploy.app import Endpoints
from quire.cluster.tools.generate import generate
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SetPace = Callable[[float], None]
STREAMED = 800
"""Tokens of a stream that a group is to hand over."""


def test_a_request_wakes_a_group_which_goes_again_when_idle(
    scaled_endpoints: Endpoints, pace: SetPace
) -> None:
    pace(0.1)  # Answers arrive in several chunks.
    with grpc.insecure_channel(scaled_endpoints.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert num_groups() == 0
        reply = health.Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        first = ask(channel)
        wait_until(lambda: num_groups() == 0)
        with ThreadPoolExecutor(4) as pool:
            again = list(pool.map(lambda _: ask(channel), range(4)))
        assert again == [first] * 4


def test_streams_of_the_group_that_goes_go_on_token_for_token(
    scaled_endpoints: Endpoints, pace: SetPace
) -> None:
    """Serve chooses which of two groups goes, so each of them has a stream. The answers are those
    of the same requests at one group that stays."""
    pace(0.005)  # Clients outpace the groups: one group is not enough.
    with (
        grpc.insecure_channel(scaled_endpoints.grpc) as channel,
        ThreadPoolExecutor(12) as pool,
        contextlib.ExitStack() as at_end,
    ):
        two, enough = threading.Event(), threading.Event()
        for event in (two, enough):
            at_end.callback(event.set)  # Without this, the pool would wait for ever on failure.
        at_end.callback(pace, 0)

        def load(number: int, max_tokens: int, until: threading.Event) -> None:
            """Sends requests with new prompts, which no cache holds."""
            while not until.is_set():
                run(channel, prompt(number, num_tokens=30), max_tokens)
                number += 10

        # One request more than a group may run. Until there are two, short ones too: however slow
        # the group is, they begin soon enough to be sent there, and wait there.
        loads = [pool.submit(load, 100 + number, 100, enough) for number in range(5)]
        loads += [pool.submit(load, 105 + number, 8, two) for number in range(5)]
        wait_until(lambda: num_groups("RUNNING") == 2)
        two.set()
        pace(0.1)  # A stream lasts longer than Serve takes to stop a group.
        streams = stream_on_each(channel, num_groups=2)
        answers = [pool.submit(rest, stream) for stream in streams.values()]
        enough.set()
        wait_until(lambda: num_groups() == 1)
        assert not any(answer.done() for answer in answers), "a stream ended before a group went"
        pace(0)
        for each in loads:
            each.result()
        for stream, answer in zip(streams.values(), answers, strict=True):
            expected = run(channel, stream.token_ids, STREAMED)
            assert answer.result() == expected
        assert "moved" in outcomes(channel)


class Stream(NamedTuple):
    token_ids: list[int]
    first: pb.GenerateResponse
    chunks: Generator[pb.GenerateResponse, None, None]


def stream_on_each(channel: grpc.Channel, *, num_groups: int) -> dict[str, Stream]:
    """A stream that runs on each group, by group. A prompt goes where Quire sends it, so streams
    are begun, and cancelled on a group that has one, until each group has one."""
    streams: dict[str, Stream] = {}
    deadline_s = time.monotonic() + 300  # Gateways learn of a new group after a delay.
    for token_ids in (prompt(seed, num_tokens=100) for seed in itertools.count(1_000_000)):
        chunks = generate(channel, asked(token_ids, STREAMED))
        with contextlib.suppress(grpc.RpcError):  # The groups are overloaded.
            first = next(chunks)
            group = first.start.routing.group
            if group in streams:
                chunks.close()
            else:
                streams[group] = Stream(token_ids, first, chunks)
            if len(streams) == num_groups:
                return streams
        assert time.monotonic() < deadline_s, f"only {list(streams)} took a stream"
        time.sleep(0.1)
    raise AssertionError


def rest(stream: Stream) -> list[int]:
    """Reads a stream to its end; returns all tokens."""
    return [token for chunk in (stream.first, *stream.chunks) for token in chunk.token_ids]


def outcomes(channel: grpc.Channel) -> set[str]:
    """Outcomes of the last requests."""
    last = InferenceStub(channel).ExplainRouting(pb.ExplainRoutingRequest(limit=1000))
    return {each.outcome.split(":")[0] for each in last.decisions}


def prompt(seed: int, *, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4000), k=num_tokens)


def asked(token_ids: list[int], max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), sampling=sampling)


def run(channel: grpc.Channel, token_ids: list[int], max_tokens: int) -> list[int]:
    """Sends a request; returns the whole answer."""
    chunks = answered(channel, asked(token_ids, max_tokens))
    assert chunks[-1].usage.num_output_tokens == max_tokens
    return [token for chunk in chunks for token in chunk.token_ids]


def ask(channel: grpc.Channel) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    chunks = answered(channel, pb.GenerateRequest(text="A whale is", sampling=sampling))
    assert len(chunks) > 1, "it did not stream"
    assert chunks[-1].usage.num_output_tokens == 16
    return [token for chunk in chunks for token in chunk.token_ids]


def answered(channel: grpc.Channel, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """Reads all chunks."""
    while True:
        try:
            return list(generate(channel, request))
        except grpc.RpcError as error:
            # A single group is overloaded.
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            time.sleep(0.1)


def num_groups(state: str | None = None) -> int:
    """Number of groups in ``state``, or in any."""
    status = serve.status().applications[GROUPS_NAME].deployments["ReplicaGroup"]
    return sum(n for name, n in status.replica_states.items() if state in (None, name))


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds; the time limit only ends failed tests."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.1)
