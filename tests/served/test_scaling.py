"""Groups that come and go under a real Ray Serve: from none, to none, and again."""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from tests.served.conftest import GROUPS_NAME

from quire.cluster.client import generate
from quire.cluster.deploy.app import Endpoints
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SetPace = Callable[[float], None]


def test_a_request_wakes_a_group_which_goes_again_when_idle(
    scaled_endpoints: Endpoints, pace: SetPace
) -> None:
    pace(0.1)  # So that an answer does not come all at once.
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
    """Serve chooses the group, so that each of the two has a stream. Where Serve's choice had none,
    since its stream had just ended or was sent to the other, which was less busy, it is asked
    again."""
    with grpc.insecure_channel(scaled_endpoints.grpc) as channel:
        for attempt in range(8):
            one_of_two_groups_goes(channel, pace, seed=attempt * 10_000)
            if "moved" in (ended := outcomes(channel)):
                return
        pytest.fail(f"no stream was moved in eight attempts: {ended}")


def one_of_two_groups_goes(channel: grpc.Channel, pace: SetPace, *, seed: int) -> None:
    """Checks that the streams on both have the same tokens as undisturbed ones."""
    pace(0.005)  # Groups are slower than the clients here: more is asked than one can do.
    with ThreadPoolExecutor(10) as pool, contextlib.ExitStack() as at_end:
        older, _, _ = run(channel, prompt(seed), 2)
        two, enough, ended = threading.Event(), threading.Event(), threading.Event()
        for event in (two, enough, ended):
            at_end.callback(event.set)  # Else the pool would wait for ever where this fails.
        at_end.callback(pace, 0)

        def load(number: int, max_tokens: int, until: threading.Event) -> None:
            """Requests that no cache knows."""
            while not until.is_set():
                run(channel, prompt(number, num_tokens=30), max_tokens)
                number += 10

        def stream(token_ids: list[int], began: threading.Event) -> list[list[int]]:
            answers = []
            while not ended.is_set():
                answers.append(run(channel, token_ids, 400, began=began)[2])
            return answers

        # One request more than a group may run. Until there are two, short ones too: however slow
        # the group is, they begin soon enough to be sent there, and wait there.
        loads = [pool.submit(load, seed + 100 + number, 100, enough) for number in range(5)]
        loads += [pool.submit(load, seed + 105 + number, 8, two) for number in range(5)]
        wait_until(lambda: num_groups("RUNNING") == 2)
        two.set()
        prompts = [
            known(channel, lambda group: group != older, seed=seed)[1],
            known(channel, lambda group: group == older, seed=seed)[1],
        ]
        pace(0.1)  # A stream lasts longer than Serve takes to stop a group.
        began = [threading.Event() for _ in prompts]
        streams = [pool.submit(stream, *each) for each in zip(prompts, began, strict=True)]
        # Both run before the load ends, and with it the need for a second group.
        wait_until(lambda: all(each.is_set() for each in began))
        enough.set()
        wait_until(lambda: num_groups() == 1)
        pace(0)
        ended.set()
        for each in loads:
            each.result()
        for streamed, token_ids in zip(streams, prompts, strict=True):
            _, _, expected = run(channel, token_ids, 400)
            assert all(answer == expected for answer in streamed.result())


def outcomes(channel: grpc.Channel) -> set[str]:
    """How the last requests ended."""
    last = InferenceStub(channel).ExplainRouting(pb.ExplainRoutingRequest(limit=1000))
    return {each.outcome.split(":")[0] for each in last.decisions}


def prompt(seed: int, *, num_tokens: int = 500) -> list[int]:
    return random.Random(seed).choices(range(3, 4000), k=num_tokens)


def known(
    channel: grpc.Channel, is_wanted: Callable[[str], bool], *, seed: int
) -> tuple[str, list[int]]:
    """A group that is wanted, and a prompt that it alone knows."""
    deadline_s = time.monotonic() + 300  # Gateways hear of a new group in their own time.
    for token_ids in map(prompt, itertools.count(seed + 1_000_000)):
        group, _, _ = run(channel, token_ids, 2)
        if is_wanted(group):
            return group, token_ids
        assert time.monotonic() < deadline_s, "no such group took any prompt"
    raise AssertionError


def run(
    channel: grpc.Channel,
    token_ids: list[int],
    max_tokens: int,
    *,
    began: threading.Event | None = None,
) -> tuple[str, int, list[int]]:
    """The group that took it first, the prompt tokens that it knew, and what was answered."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), sampling=sampling)
    chunks = answered(channel, request, began)
    assert chunks[-1].usage.num_output_tokens == max_tokens
    start = chunks[0].start
    answer = [token for chunk in chunks for token in chunk.token_ids]
    return start.routing.group, start.num_cached_tokens, answer


def ask(channel: grpc.Channel) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    chunks = answered(channel, pb.GenerateRequest(text="A whale is", sampling=sampling))
    assert len(chunks) > 1, "it did not stream"
    assert chunks[-1].usage.num_output_tokens == 16
    return [token for chunk in chunks for token in chunk.token_ids]


def answered(
    channel: grpc.Channel, request: pb.GenerateRequest, began: threading.Event | None = None
) -> list[pb.GenerateResponse]:
    """All chunks; ``began`` is set with the first."""
    chunks: list[pb.GenerateResponse] = []
    while not chunks:
        try:
            for chunk in generate(channel, request):
                chunks.append(chunk)
                if began is not None:
                    began.set()
        except grpc.RpcError as error:
            # While there is one group only, it has more to do than it should.
            if chunks or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            time.sleep(0.1)
    return chunks


def num_groups(state: str | None = None) -> int:
    """In that state, or in any."""
    status = serve.status().applications[GROUPS_NAME].deployments["ReplicaGroup"]
    return sum(n for name, n in status.replica_states.items() if state in (None, name))


def wait_until(condition: Callable[[], bool]) -> None:
    """The bound only ends a test that has failed."""
    deadline_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.1)
