import socket

import pytest

from quire.cluster.features.kv_exchange.frames import TICKET_BYTES
from quire.cluster.features.kv_exchange.listener import KvListener


def test_connections_without_a_ticket_are_closed_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = KvListener("127.0.0.1", tls=None, take=lambda ticket, connection: False)
    try:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
                stranger.sendall(b"x" * TICKET_BYTES)
                assert stranger.recv(1) == b""
    finally:
        listener.close()
    assert caplog.messages == ["a connection from 127.0.0.1 showed no valid ticket"]
