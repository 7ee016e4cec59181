"""End to end: real clients, a real Ray cluster and real ranks."""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar, cast

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ray import serve
from tests.served.conftest import GROUPS_NAME

from quire import demo_model
from quire.cluster.cli.main import main
from quire.cluster.deploy.app import Endpoints
from quire.cluster.tools.generate import chat_request, generate
from quire.llm import LLM, SamplingParams
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.worker.request.outputs import TokenDelta

T = TypeVar("T")
SetPace = Callable[[float], None]

pytestmark = pytest.mark.cluster

BLOCK_SIZE = 16
_numbers = itertools.count()


def test_streamed_tokens_are_those_of_the_offline_engine(
    channel: grpc.Channel, pace: SetPace
) -> None:
    text = "Paged attention is"
    request = pb.GenerateRequest(
        text=text, sampling=pb.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    )
    pace(0.5)  # A delayed client would otherwise get all tokens in one chunk.
    stream = generate(channel, request)
    chunks = [next(stream)]
    pace(0)
    chunks += stream
    offset = 0
    for chunk in chunks:
        assert chunk.token_offset == offset
        offset += len(chunk.token_ids)
    assert len(chunks) > 1, "it did not stream"

    with LLM(demo_model.PATH, dtype="float32", num_blocks=64, num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        expected = llm.generate(text, params, use_tqdm=False)[0].outputs[0]
    assert [token for chunk in chunks for token in chunk.token_ids] == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert chunks[-1].usage.num_output_tokens == 24


def test_a_seed_brings_the_same_tokens_whoever_shares_the_batch(channel: grpc.Channel) -> None:
    def sample(seed: int) -> list[int]:
        sampling = pb.SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=16)
        chunks = generate(channel, pb.GenerateRequest(text="A whale is", sampling=sampling))
        return [token for chunk in chunks for token in chunk.token_ids]

    alone = [sample(seed) for seed in range(4)]
    with ThreadPoolExecutor(8) as pool:
        crowded = list(pool.map(sample, [0, 1, 2, 3, 0, 1, 2, 3]))
    assert crowded == alone * 2


def test_a_second_request_goes_to_the_group_that_holds_its_prefix(
    channel: grpc.Channel, endpoints: Endpoints
) -> None:
    system = f"You are assistant number {next(_numbers)}. " + "Answer plainly and briefly. " * 12
    starts = []
    for question in ("What is a harbor?", "What is a planet?", "Who are you?"):
        request = chat_request(
            [("system", system), ("user", question)],
            sampling=pb.SamplingParams(temperature=0, max_tokens=4),
        )
        starts.append(next(chunk.start for chunk in list(generate(channel, request))))
        _eventually(lambda: _directory_is_true(endpoints))
    first, *later = starts
    assert first.num_cached_tokens < 2 * BLOCK_SIZE  # The template's beginning may be cached.
    for start in later:
        assert start.routing.group == first.routing.group
        assert start.routing.reason == "cached_prefix"
        assert start.num_cached_tokens >= 64
        assert start.num_cached_tokens == start.routing.predicted_cached_tokens


def test_a_cancelled_stream_returns_its_blocks(
    channel: grpc.Channel, endpoints: Endpoints, pace: SetPace
) -> None:
    pace(0.1)  # It must not end before its blocks are seen.
    sampling = pb.SamplingParams(n=8, max_tokens=900, ignore_eos=True)
    stream = generate(channel, pb.GenerateRequest(text="Once upon a time", sampling=sampling))
    next(stream)
    _eventually(lambda: _metric(endpoints, "quire_group_held_blocks") > 0)
    stream.close()
    _eventually(lambda: _metric(endpoints, "quire_group_held_blocks") == 0)
    _eventually(lambda: _metric(endpoints, "quire_group_running") == 0)


def test_other_serve_applications_call_a_group_through_a_handle(endpoints: Endpoints) -> None:
    handle = serve.get_deployment_handle("ReplicaGroup", app_name=GROUPS_NAME)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    stream = handle.options(method_name="generate", stream=True).remote([9, 10, 11], params)
    deltas = list(cast("Iterable[TokenDelta]", stream))
    assert [delta.token_offset for delta in deltas] == [0, 1, 2, 3]
    assert deltas[-1].finish_reason == "length"


def test_calls_through_handles_are_batched_by_the_engine_and_not_held_back_by_serve(
    endpoints: Endpoints, pace: SetPace
) -> None:
    pace(0.1)  # None may end before all are seen.
    handle = serve.get_deployment_handle("ReplicaGroup", app_name=GROUPS_NAME)
    call = handle.options(method_name="generate", stream=True).remote
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    streams = [call([9, 10, 11], params) for _ in range(12)]
    _eventually(lambda: _metric(endpoints, "quire_group_running") == 12)
    for stream in streams:
        stream.cancel()  # type: ignore[no-untyped-call]
    _eventually(lambda: _metric(endpoints, "quire_group_running") == 0)


def test_the_openai_client_completes_chats_and_streams(endpoints: Endpoints) -> None:
    with openai.OpenAI(base_url=f"http://{endpoints.http}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["demo"]
        completion = client.completions.create(
            model="demo", prompt="A whale is", max_tokens=8, temperature=0
        )
        assert completion.choices[0].text
        chat = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is a harbor?"}],
            max_tokens=16,
            temperature=0,
        )
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What is a harbor?"}],
            max_tokens=16,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == chat.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="nobody"):
            client.completions.create(model="nobody", prompt="x")


def test_health_and_reflection_answer(channel: grpc.Channel, endpoints: Endpoints) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "quire.v1.Inference"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    listed = next(iter(reflection.ServerReflectionInfo(iter([request]))))
    names = {service.name for service in listed.list_services_response.service}
    assert "quire.v1.Inference" in names
    assert httpx.get(f"http://{endpoints.http}/health", timeout=120).status_code == 200


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", r"prompt"),
        (pb.GenerateRequest(text=""), "INVALID_ARGUMENT", r"prompt is empty"),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 999_999])),
            "INVALID_ARGUMENT",
            r"token id 999999 at position 1 .* 0 to 4095",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(max_tokens=5000)),
            "INVALID_ARGUMENT",
            r"max_tokens=5000.*1024",
        ),
        (
            pb.GenerateRequest(text="x", sampling=pb.SamplingParams(top_p=1.5)),
            "INVALID_ARGUMENT",
            r"top_p=1.5",
        ),
        (pb.GenerateRequest(text="x", model="nobody"), "NOT_FOUND", r"nobody.*demo"),
    ],
)
def test_bad_input_is_refused_and_harms_nothing(
    channel: grpc.Channel, request_: pb.GenerateRequest, code: str, details: str
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        list(generate(channel, request_))
    assert error.value.code().name == code
    assert re.search(details, error.value.details() or "")
    good = pb.GenerateRequest(text="A whale", sampling=pb.SamplingParams(max_tokens=2))
    assert list(generate(channel, good))[-1].usage.num_output_tokens == 2


def test_a_request_is_explained_by_its_id(
    channel: grpc.Channel, endpoints: Endpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    request = pb.GenerateRequest(text="A whale is", sampling=pb.SamplingParams(max_tokens=2))
    start = next(iter(generate(channel, request))).start
    assert main(["explain", start.request_id, "--address", endpoints.grpc]) == 0
    shown = capsys.readouterr().out
    assert f"went to {start.routing.group}: {start.routing.reason}" in shown
    assert f"-> {start.routing.group}" in re.sub(" +", " ", shown)
    everything = httpx.get(f"http://{endpoints.http}/v1/routing/decisions", timeout=120)
    assert start.request_id in [each["request_id"] for each in everything.json()["data"]]


def test_text_becomes_tokens_and_text_again(channel: grpc.Channel) -> None:
    stub = InferenceStub(channel)
    tokens = stub.Tokenize(pb.TokenizeRequest(text="Grüß Gott 🌍", no_special_tokens=True))
    assert tokens.max_model_len == 1024
    text = stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "Grüß Gott 🌍"


def test_nothing_listens_beyond_the_loopback(endpoints: Endpoints) -> None:
    """Covers the ports of Ray and Serve too."""
    found = _listening_addresses()
    assert endpoints.http.partition(":")[0] in found
    assert not {address for address in found if not ip_address(address).is_loopback}


@pytest.mark.usefixtures("endpoints")
def test_groups_and_gateways_do_not_come_after_all_other_processes() -> None:
    def niceness(process: Path) -> list[int]:
        is_worker = (process / "cmdline").read_bytes().startswith(b"ray::")
        return [os.getpriority(os.PRIO_PROCESS, int(process.name))] if is_worker else []

    assert _of_processes(niceness) == {os.getpriority(os.PRIO_PROCESS, 0)}


def _listening_addresses() -> set[str]:
    """Listening addresses of all processes of the test cluster."""
    inodes = _of_processes(lambda process: [os.readlink(fd) for fd in (process / "fd").iterdir()])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # 0A: it listens.
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _of_processes(ask: Callable[[Path], Iterable[T]]) -> set[T]:
    """Results of ``ask`` for all processes of the test cluster; it gets their folders in /proc."""
    mark = f"QUIRE_TEST_CLUSTER={os.environ['QUIRE_TEST_CLUSTER']}".encode()
    found: set[T] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.update(ask(process))
        except OSError:
            continue  # It has just ended, or is another user's.
    return found


def _address(words: str) -> str:
    """Parses an address from /proc: words of 32 bits, the lowest byte first."""
    packed = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    address = ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


def _directory_is_true(endpoints: Endpoints) -> bool:
    """Block events travel on a separate stream, later than the load that comes with tokens."""
    known = _metric(endpoints, "quire_directory_holdings")
    return known == _metric(endpoints, "quire_group_cached_blocks")


def _metric(endpoints: Endpoints, name: str) -> float:
    """The sum of a metric over its labels."""
    page = httpx.get(f"http://{endpoints.http}/metrics", timeout=120).text
    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, flags=re.MULTILINE)
    assert values, f"{name} is not in /metrics"
    return sum(map(float, values))


def _eventually(condition: Callable[[], bool]) -> None:
    """Waits for a result of the next heartbeats; the time limit only ends failed tests."""
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.05)
