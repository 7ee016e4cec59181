import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.cluster.deploy import wait_idle


@contextmanager
def gateway(*num_inflight: float, silent: bool = False, status: int = 200) -> Iterator[str]:
    """URL of a server whose metrics show the given numbers in turn, and then keep the last."""
    left = list(num_inflight or (0,))
    stopped = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if silent:
                stopped.wait()
                return
            number = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(f'quire_inflight_completions{{model="m {{}}"}} {number}\n'.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            stopped.set()
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_idle, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(wait_idle, "_ANSWER_WITHIN_S", 120)  # Slow machines may take longer.


def test_the_end_of_the_last_request_is_waited_for() -> None:
    with gateway(3, 2.0, 1, 0) as url:
        assert wait_idle.main([url]) == 0


def test_what_is_left_at_the_end_of_the_time_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(2) as url:
        assert wait_idle.main([url, "--timeout-s", "0.1"]) == 1
    assert "2 requests are left after 0.1 s" in capsys.readouterr().out


def test_a_gateway_that_is_gone_has_none_left() -> None:
    with gateway(2) as url:
        pass
    assert wait_idle.main([url]) == 0


def test_a_gateway_too_busy_to_answer_is_not_taken_for_idle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait_idle, "_ANSWER_WITHIN_S", 0.2)
    begin_s = time.monotonic()
    with gateway(silent=True) as url:
        assert wait_idle.main([url, "--timeout-s", "0.5"]) == 1
    assert time.monotonic() - begin_s >= 0.5
    assert "does not tell" in capsys.readouterr().out


def test_a_gateway_that_does_not_tell_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(status=401) as url:
        assert wait_idle.main([url, "--timeout-s", "0.1"]) == 1
    assert "the gateway does not tell after 0.1 s" in capsys.readouterr().out
