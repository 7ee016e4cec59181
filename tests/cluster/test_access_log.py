"""The access log's line for each call, however it ends and without its text; clients' timing."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from quire.cluster.deploy.logs import LogWriter
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.access_log import _line, fields_of, log_access
from quire.cluster.telemetry.timeline import Timeline
from quire.v1 import admin_pb2, admin_pb2_grpc
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

SECRET = "the cat sat"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    async def wait(self, num: int) -> None:
        """Waits for this many lines, since a call's line follows its answer."""
        while len(self.records) < num:
            await asyncio.sleep(0.005)

    def of(self, path: str) -> list[dict[str, Any]]:
        return [vars(each) for each in self.records if vars(each)["path"] == path]


@pytest.fixture
def lines() -> Iterator[Lines]:
    logger, kept = logging.getLogger("quire.access"), Lines()
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield kept
    logger.removeHandler(kept)
    logger.setLevel(level)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
}


async def test_each_call_has_one_line_without_its_text(start_cluster: Any, lines: Lines) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            for path, body in BODIES.items():
                for more in ({}, {"stream": True}):
                    answer = await client.post(
                        path, json=body | more, headers={"X-Request-Id": "mine"}
                    )
                    assert answer.status_code == 200
            await client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": -2})
            await client.post("/v1/completions", json={"prompt": SECRET, "model": "none"})
            await client.post("/v1/nothing", json={"prompt": SECRET})
            await client.get("/health")
            await client.get("/metrics")
        await lines.wait(2 * len(BODIES) + 3)
    assert len(lines.records) == 2 * len(BODIES) + 3
    for path in BODIES:
        for line in lines.of(path)[:2]:
            assert (line["method"], line["status"]) == ("POST", "200")
            assert line["client_request_id"] == "mine"
            assert line["model"] == "hash"
            assert line["prompt_tokens"] > 0
            assert 1 <= line["output_tokens"] <= 4
            assert line["finish"] in ("length", "stop")
            assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
            assert line["groups"]
    refused, unknown = lines.of("/v1/completions")[2:]
    assert (refused["status"], refused["error"]) == ("400", "INVALID_REQUEST")
    assert (unknown["status"], unknown["error"]) == ("404", "MODEL_NOT_FOUND")
    assert lines.of("/v1/nothing")[0]["status"] == "404"
    assert not any(SECRET in str(vars(record)) for record in lines.records)


async def test_a_grpc_call_has_one_too(start_cluster: Any, lines: Lines) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        sampling = pb.SamplingParams(max_tokens=4)
        request = pb.GenerateRequest(text=SECRET, sampling=sampling)
        metadata = (("x-request-id", "mine"),)
        assert [each async for each in cluster.inference.Generate(request, metadata=metadata)]
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in cluster.inference.Generate(pb.GenerateRequest(sampling=sampling)):
                pass
        await lines.wait(2)
    served, refused = lines.of("/quire.v1.Inference/Generate")
    assert (served["method"], served["status"]) == ("gRPC", "OK")
    assert (served["client"], served["client_request_id"]) == ("127.0.0.1", "mine")
    assert 1 <= served["output_tokens"] <= 4
    assert (refused["status"], refused["error"]) == ("INVALID_ARGUMENT", "INVALID_REQUEST")


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_looks_of_our_own_tools_have_lines_for_debugging_alone(
    start_cluster: Any, lines: Lines, level: int
) -> None:
    logging.getLogger("quire.access").setLevel(level)
    keys = ApiKeys.of_token("right key for all")
    async with start_cluster(num_groups=1, keys=keys) as cluster:
        cluster.models.on_finished.append(log_access)
        shown = {"Authorization": "Bearer right key for all"}
        looked = "/quire.v1.Admin/ListGroups"
        metadata = (("authorization", "Bearer right key for all"),)
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            page = (await client.get("/ui")).text
            asset = re.findall(r'="(?:\./)?(ui/assets/[^"]+)"', page)[0]
            paths = ["/ui", f"/{asset}", "/v1/routing/decisions"]
            for path in paths[1:]:
                assert (await client.get(path, headers=shown)).status_code == 200
            async with client.stream("GET", "/ui/events", headers=shown) as events:
                await anext(events.aiter_lines())
            await client.get("/v1/models")  # Without a key.
            await client.get("/v1/models/none", headers=shown)
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            admin: Any = admin_pb2_grpc.AdminStub(channel)
            await admin.ListGroups(admin_pb2.ListGroupsRequest(), metadata=metadata)
            with pytest.raises(grpc.aio.AioRpcError):
                await admin.ListGroups(admin_pb2.ListGroupsRequest())
        await lines.wait(3 if level == logging.INFO else 3 + len(paths) + 2)
    told = sorted((each.__dict__["path"], each.__dict__["status"]) for each in lines.records)
    refused = [("/v1/models", "401"), ("/v1/models/none", "404"), (looked, "UNAUTHENTICATED")]
    quiet = [(path, "200") for path in [*paths, "/ui/events"]] + [(looked, "OK")]
    assert told == sorted(refused if level == logging.INFO else refused + quiet)


async def test_a_stranger_and_a_tenant_are_told_apart(start_cluster: Any, lines: Lines) -> None:
    keys = ApiKeys.of_token("right key for all")
    async with start_cluster(num_groups=1, keys=keys) as cluster:
        cluster.models.on_finished.append(log_access)
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            await client.post("/v1/completions", json=BODIES["/v1/completions"])
        await lines.wait(1)
    (line,) = lines.of("/v1/completions")
    assert (line["status"], line["error"]) == ("401", "INVALID_API_KEY")
    assert "right key" not in str(line)


async def test_a_client_that_leaves_is_told_of(start_cluster: Any, lines: Lines) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        client = openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none")
        stream = await client.completions.create(
            model="hash",
            prompt=SECRET,
            max_tokens=300,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        await anext(aiter(stream))
        await stream.close()
        await client.close()
        await lines.wait(1)
    (line,) = lines.of("/v1/completions")
    assert line["finish"] in ("cancelled", "length")


@pytest.mark.parametrize(
    ("sent", "begins"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "400 request_id="),  # A TLS handshake.
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400 request_id="),
        (b"hello\r\n\r\n", "400 request_id="),
        (b"GET /" + b"a" * 2**17, "431 request_id="),
        (b"GET /a?b HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "GET /a 400 request_id="),
    ],
    ids=["tls", "http2", "words", "large", "hosts"],
)
async def test_a_connection_that_speaks_no_http_has_one_line(
    start_cluster: Any, lines: Lines, sent: bytes, begins: str
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        url = httpx.URL(cluster.http_url)
        silent = await asyncio.open_connection(url.host, url.port)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(sent)
        answer = await reader.read()
        writer.write(sent)  # Nobody reads further.
        await lines.wait(1)
        for each in (writer, silent[1]):
            each.close()
        page = cluster.models.telemetry.render().decode()
    (line,) = [each.getMessage() for each in lines.records]
    assert line.startswith(begins)
    said = vars(lines.records[0])
    assert said["client"] == "127.0.0.1"
    assert said["error"] == "INVALID_REQUEST"
    assert f"x-request-id: {said['request_id']}".encode() in answer.lower()
    assert answer.lower().count(b"connection: close") == 1
    assert f'quire_requests_total{{endpoint="other",status="{said["status"]}"}} 1.0' in page


@pytest.mark.slow
async def test_a_failover_names_both_groups(start_cluster: Any, lines: Lines) -> None:
    async with start_cluster(num_groups=2) as cluster:
        cluster.take_steps_of(0.01)
        cluster.models.on_finished.append(log_access)
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            asked = {
                "prompt": SECRET,
                "max_tokens": 300,
                "ignore_eos": True,
                "stream": True,
                "seed": 4,
            }
            headers = {"X-Request-Timing": "1"}
            events = []
            async with client.stream("POST", "/v1/completions", json=asked, headers=headers) as got:
                async for text in got.aiter_lines():
                    if not text.startswith("data: {"):
                        continue
                    events.append(json.loads(text[6:]))
                    if len(events) == 2:
                        await busy(cluster).kill()
        await lines.wait(1)
    (line,) = lines.of("/v1/completions")
    assert len(line["groups"].split(",")) == 2
    (timing,) = [each["timing"] for each in events if "timing" in each]
    first, second = timing["completions"][0]["attempts"]
    assert [first["group"], second["group"]] == line["groups"].split(",")
    assert second["outcome"] == "length"
    assert second["resumed_tokens"] > 0
    assert first["sent_s"] <= first["first_token_s"] <= first["end_s"] <= second["sent_s"]
    assert second["end_s"] <= timing["total_s"]


def test_no_part_that_a_client_chose_makes_a_line_long() -> None:
    long = "x" * 50_000
    call = Timeline(method=long, path=long, client=long, client_id=long, model=long)
    assert len(_line(fields_of(call))) < 5 * 300


@pytest.mark.parametrize("keys", [None, ApiKeys.of_token("right key for all")])
async def test_a_refusal_has_the_id_of_its_line(
    start_cluster: Any, lines: Lines, keys: ApiKeys | None
) -> None:
    body = {"prompt": SECRET, "max_tokens": -2}
    async with start_cluster(num_groups=1, keys=keys) as cluster:
        cluster.models.on_finished.append(log_access)
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            unnamed = await client.post("/v1/completions", json=body)
            headers = {"X-Request-Id": "mine"}
            named = await client.post("/v1/completions", json=body, headers=headers)
        await lines.wait(2)
    first, second = lines.of("/v1/completions")
    assert unnamed.status_code == (400 if keys is None else 401)
    assert unnamed.headers.get_list("X-Request-Id") == [first["request_id"]]
    assert named.headers.get_list("X-Request-Id") == ["mine"] == [second["client_request_id"]]


def busy(cluster: Any) -> Any:
    (group,) = (each for each in cluster.groups.values() if each.engine_loop.num_requests)
    return group


async def test_whole_answers_tell_their_timing(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client,
    ):
        plain = await client.post("/v1/completions", json=BODIES["/v1/completions"])
        headers = {"X-Request-Timing": "1"}
        timed = await client.post(
            "/v1/completions", json=BODIES["/v1/completions"], headers=headers
        )
    marks = [each.partition(";")[0] for each in plain.headers["server-timing"].split(", ")]
    assert marks == ["prepare", "queue", "ttft", "total"]
    assert "timing" not in plain.json()
    timing = timed.json()["timing"]
    assert 0 <= timing["prepared_s"] <= timing["admitted_s"] <= timing["first_token_s"]
    assert timing["completions"][0]["attempts"][0]["outcome"] in ("length", "stop")


@pytest.mark.parametrize("text", ["a\nb", "a b", 'a"b', "a=b", "\x1b[2J", "ä\u2028"])
def test_what_a_client_sends_stays_in_its_place(text: str) -> None:
    line = _line({"method": "GET", "path": text, "status": "404"})
    assert line.isprintable()
    method, rest = line.split(" ", 1)
    assert (method, json.JSONDecoder().raw_decode(rest)[0]) == ("GET", text)


def test_a_full_log_drops_lines_and_says_so() -> None:
    gate = Blocked()
    writer = LogWriter([gate], max_lines=4)
    logger = logging.Logger("quire")
    logger.addHandler(writer)
    for number in range(20):
        logger.warning("line %d", number)
    assert writer.num_dropped >= 15
    gate.go()
    writer.close()
    assert gate.written[0] == "line 0"
    assert len(gate.written) <= 5


class Blocked(logging.Handler):
    """A log handler that blocks until released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()
        self.written: list[str] = []
        self.go = self.is_free.set

    def emit(self, record: logging.LogRecord) -> None:
        self.is_free.wait()
        self.written.append(record.getMessage())


def test_lines_of_a_call_have_its_ids() -> None:
    kept = Lines()
    writer = LogWriter([kept])
    logger = logging.Logger("quire")
    logger.addHandler(writer)
    token = timeline.begin(Timeline(request_id="r", tenant="t", trace_id="abc"))
    logger.warning("within")
    timeline.leave(token)
    logger.warning("without")
    writer.close()
    within, without = kept.records
    assert (vars(within)["request_id"], vars(within)["trace_id"]) == ("r", "abc")
    assert "request_id" not in vars(without)
