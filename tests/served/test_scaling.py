"""Groups that come and go under a real Ray Serve: from none, to none, and again."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve

from quire.cluster.app import APP_NAME, Endpoints
from quire.cluster.client import generate
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_a_request_wakes_a_group_which_goes_again_when_idle(scaled_endpoints: Endpoints) -> None:
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


def test_the_group_goes_whose_prefixes_are_worth_least(scaled_endpoints: Endpoints) -> None:
    """The older one, where Serve would take the newer; its streams go on, token for token."""
    stream = prompt(1), 400
    with grpc.insecure_channel(scaled_endpoints.grpc) as channel, ThreadPoolExecutor(10) as pool:
        older, _, expected = run(channel, *stream)
        enough, ended = threading.Event(), threading.Event()

        def load(number: int) -> None:
            """One request more than a group may run, none of which a cache knows."""
            while not enough.is_set():
                run(channel, prompt(number, num_tokens=30), 100)
                number += 10

        def streams() -> list[tuple[str, list[int]]]:
            ran = []
            while not ended.is_set():
                group, _, token_ids = run(channel, *stream)
                ran.append((group, token_ids))
            return ran

        loads = [pool.submit(load, 100 + number) for number in range(5)]
        wait_until(lambda: num_groups("RUNNING") == 2)
        newer, known = known_elsewhere(channel, older)
        for _ in range(60):
            assert run(channel, known, 2)[:2] == (newer, 848)
        enough.set()
        for each in loads:
            each.result()
        # They go where their prompt is known.
        running = [pool.submit(streams) for _ in range(2)]
        wait_until(lambda: num_groups() == 1)
        ended.set()
        ran = [each for one in running for each in one.result()]
        assert all(token_ids == expected for _, token_ids in ran)
        last = InferenceStub(channel).ExplainRouting(pb.ExplainRoutingRequest(limit=1000))
        ends = {(each.routing.group, each.outcome.split(":")[0]) for each in last.decisions}
        assert (older, "moved") in ends
        assert run(channel, known, 2)[:2] == (newer, 848)


def prompt(seed: int, *, num_tokens: int = 500) -> list[int]:
    return random.Random(seed).choices(range(3, 4000), k=num_tokens)


def known_elsewhere(channel: grpc.Channel, group: str) -> tuple[str, list[int]]:
    """Another group, and a prompt of 850 tokens that only it knows."""
    for seed in range(1000, 1200):
        token_ids = prompt(seed, num_tokens=850)
        other, _, _ = run(channel, token_ids, 2)
        if other != group:
            return other, token_ids
    raise AssertionError(f"{group} took every prompt")


def run(channel: grpc.Channel, token_ids: list[int], max_tokens: int) -> tuple[str, int, list[int]]:
    """The group that took it first, the prompt tokens that it knew, and what was answered."""
    sampling = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), sampling=sampling)
    chunks: list[pb.GenerateResponse] = []
    while not chunks:
        try:
            chunks.extend(generate(channel, request))
        except grpc.RpcError as error:
            # While there is one group only, it has more to do than it should.
            if chunks or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            time.sleep(0.1)
    assert chunks[-1].usage.num_output_tokens == max_tokens
    start = chunks[0].start
    answer = [token for chunk in chunks for token in chunk.token_ids]
    return start.routing.group, start.num_cached_tokens, answer


def ask(channel: grpc.Channel) -> list[int]:
    sampling = pb.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    chunks = list(generate(channel, pb.GenerateRequest(text="A whale is", sampling=sampling)))
    assert len(chunks) > 1, "it did not stream"
    assert chunks[-1].usage.num_output_tokens == 16
    return [token for chunk in chunks for token in chunk.token_ids]


def num_groups(state: str | None = None) -> int:
    """In that state, or in any."""
    status = serve.status().applications[APP_NAME].deployments["ReplicaGroup"]
    return sum(n for name, n in status.replica_states.items() if state in (None, name))


def wait_until(condition: Callable[[], bool]) -> None:
    """The bound only ends a test that has failed."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.1)
