"""The command ``quire bench serve`` against an HTTP server of the standard library."""

import json
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest

from quire.cluster.cli.main import main


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as requested, two in a chunk, and records requests."""

    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        models = [{"id": "vectors", "task": "embed"}, {"id": "tiny"}, {"id": "other"}]
        self._whole(200, {"data": models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, dict(self.headers), body))
            number = len(self.server.asked)
        if self.server.refuses and number > 1 and number % 2:
            self._whole(429, {"error": {"message": "too many requests", "type": "limit"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        total = body["max_tokens"]
        num_prompt = len(body["prompt"]) if "prompt" in body else 5
        for count in [*range(2, total, 2), total]:
            choice = {"text": "ab", "finish_reason": "length" if count == total else None}
            usage = {
                "prompt_tokens": num_prompt,
                "completion_tokens": count,
                "prompt_tokens_details": {"cached_tokens": 4},
            }
            self._event({"choices": [choice], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())

    def _whole(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = Lock()
        self.asked: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.refuses = False


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def bench(server: Server, *arguments: str) -> int:
    port = str(server.server_address[1])
    return main(["bench", "serve", "--port", port, *arguments])


def test_a_load_is_sent_reported_and_written(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = bench(
        *(server, "--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "7"),
        *("--request-rate", "500", "--max-concurrency", "3", "--num-warmups", "1", "--ignore-eos"),
        *("--goodput", "ttft:60000", "e2el:60000", "--metric-percentiles", "50,99.9"),
        *("--percentile-metrics", "ttft,itl,client_queue_time", "--extra-body", '{"top_p": 0.5}'),
        *("--save-detailed", "--result-dir", str(tmp_path / "new"), "--result-filename", "r.json"),
        *("--metadata", "gpu=none", "run=2", "--label", "mine", "--api-key", "k"),
        *("--header", "X-Team=blue"),
    )
    assert status == 0
    shown = capsys.readouterr().out
    assert "requests completed" in shown
    assert "input tokens cached" in shown
    assert "each counts as one" not in shown

    path, headers, body = server.asked[-1]
    assert path == "/v1/completions"
    assert (headers["Authorization"], headers["X-Team"]) == ("Bearer k", "blue")
    assert (body["model"], body["max_tokens"], body["top_p"]) == ("tiny", 7, 0.5)
    assert body["ignore_eos"] is True
    assert len(server.asked) == 1 + 1 + 6  # The probe, the warm-up, the load.
    assert len(server.asked[0][2]["prompt"]) == 8
    assert server.asked[0][2]["max_tokens"] == 1

    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 42)
    assert (result["total_input_tokens"], result["total_cached_tokens"]) == (48, 24)
    assert (result["gpu"], result["run"], result["label"]) == ("none", "2", "mine")
    assert (result["model_id"], result["backend"], result["request_rate"]) == (
        "tiny",
        "openai",
        500,
    )
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert "p99.9_client_queue_time_ms" in result
    assert "mean_e2el_ms" not in result
    assert [len(gaps) for gaps in result["itls"]] == [6] * 6
    assert result["generated_texts"] == ["abababab"] * 6
    assert result["chunk_tokens_counted_by"] == "usage"


def test_chats_are_asked_as_such_at_an_address_with_v1(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    monkeypatch.setenv("QUIRE_API_KEY", "ours")
    monkeypatch.chdir(tmp_path)
    base = f"http://127.0.0.1:{server.server_address[1]}/v1/"
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}], "output_tokens": 3}\n' * 2)
    status = main(
        [
            *("bench", "serve", "--base-url", base, "--backend", "openai-chat", "--model", "named"),
            *("--dataset-name", "custom", "--dataset-path", str(file), "--save-result"),
        ]
    )
    assert status == 0
    path, headers, body = server.asked[-1]
    assert (path, headers["Authorization"]) == ("/v1/chat/completions", "Bearer ours")
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (body["model"], len(server.asked)) == ("named", 3)
    (written,) = tmp_path.glob("openai-chat-infqps-named-*.json")
    result = json.loads(written.read_text())
    assert (result["num_prompts"], result["request_rate"]) == (2, "inf")
    assert "ttfts" not in result


def test_refusals_are_told_by_kind_with_an_example(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refuses = True
    status = bench(server, "--num-prompts", "5", "--random-output-len", "2")
    assert status == 0
    shown = capsys.readouterr().out
    assert "failed, HTTP 429: 2 requests, such as: HTTP 429: too many requests" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--port", "1"], 1, "Cannot connect to host 127.0.0.1:1"),
        (["--port", "1", "--model", "m"], 1, "first request failed, so that no load was sent"),
        (["--base-url", "localhost:80"], 2, "base_url=localhost:80: must be http://HOST:PORT"),
        (["--base-url", "http://"], 2, "base_url=http://: must be http://HOST:PORT"),
        (["--port", "65536"], 2, "base_url=http://127.0.0.1:65536: must be http://HOST:PORT"),
        (["--endpoint", "/v1/chat"], 2, "endpoint=/v1/chat: give a path that ends in /completions"),
        (["--request-rate", "nan"], 2, "request_rate=nan: must be above 0"),
        (["--request-rate", "0"], 2, r"request_rate=0.0: must be above 0"),
        (["--burstiness", "0"], 2, "burstiness=0.0: must be above 0"),
        (["--max-concurrency", "0"], 2, "max_concurrency=0: must be 1 or more"),
        (["--num-warmups", "-1"], 2, "num_warmups=-1: must be 0 or more"),
        (["--timeout-s", "0"], 2, "timeout_s=0.0: must be above 0"),
        (["--num-prompts", "0"], 2, "num_prompts=0: must be 1 or more"),
        (["--goodput", "itl:3"], 2, "goodput=itl: must be of ttft, tpot, e2el"),
        (["--goodput", "ttft"], 2, "argument --goodput: 'ttft' must be NAME:MS"),
        (["--percentile-metrics", "tftt"], 2, "percentile_metrics=tftt: must be of ttft, tpot"),
        (["--metric-percentiles", "101"], 2, "metric_percentiles=101: must be 0 to 100"),
        (["--metric-percentiles", "p99"], 2, "metric_percentiles=p99: must be numbers"),
        (["--metadata", "x"], 2, "argument --metadata: 'x' must be NAME=VALUE"),
        (["--extra-body", "[1]"], 2, "argument --extra-body: '[1]' must be a JSON object"),
        (["--api-key", "a\nb"], 2, "header Authorization: has a line break"),
        (["--dataset-name", "custom"], 2, "dataset_name=custom: also give --dataset-path"),
        (["--tokenizer", "/nowhere/x/y"], 2, "tokenizer=/nowhere/x/y: "),
        (["--save-result", "--result-dir", __file__], 2, "File exists; give another --result-dir"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found: object = main(["bench", "serve", *arguments])
    except SystemExit as ended:
        found = ended.code
    assert says in capsys.readouterr().err
    assert found == status


def test_the_load_needs_neither_torch_nor_ray() -> None:
    program = (
        "import sys; import quire.cluster.tools.bench.serving.command; "
        "print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"
