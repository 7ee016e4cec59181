"""Facts of sockets by file descriptor, and addresses that the kernel shuts out."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from quire.cluster.features.guard.own_sockets import (
    acked_and_received,
    borrowed,
    connection_of,
    cookie_of,
    descriptors,
    end,
    listening_port,
    num_accepted,
    shut_out,
)


@contextlib.contextmanager
def listening(host: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        yield listener


@contextlib.contextmanager
def connected(
    listener: socket.socket, host: str = "127.0.0.1"
) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket(listener.family) as client:
        client.settimeout(0.3)
        client.bind((host, 0))
        client.connect(listener.getsockname()[:2])
        with listener.accept()[0] as server:
            yield client, server


def is_let_in(listener: socket.socket, host: str) -> bool:
    with contextlib.suppress(TimeoutError), connected(listener, host) as (client, server):
        client.sendall(b"through the filter that the connection inherits")
        return bool(server.recv(100))
    return False


def test_the_kernel_counts_accepted_connections() -> None:
    before = num_accepted()
    assert before is not None
    with listening("127.0.0.1") as listener, connected(listener):
        now = num_accepted()
    assert now is not None
    assert now > before


def test_every_socket_has_a_cookie_of_its_own_and_other_files_have_none() -> None:
    with listening("127.0.0.1") as listener, connected(listener) as pair, open(os.devnull) as file:
        cookies = {cookie_of(sock.fileno()) for sock in (listener, *pair)}
        assert None not in cookies
        assert len(cookies) == 3
        assert cookie_of(file.fileno()) is None
        assert all(sock.fileno() in descriptors() for sock in (listener, *pair))
        closed = listener.fileno()
    assert cookie_of(closed) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_a_connection_is_known_by_its_ends(host: str) -> None:
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listening(host))
        except OSError:
            pytest.skip("this machine has no IPv6")
        target = host if host == "::1" else "127.0.0.1"  # "::" takes IPv4 too.
        client = socket.create_connection((target, listener.getsockname()[1]))
        with client, listener.accept()[0] as server:
            found = connection_of(server.fileno())
            assert found is not None
            assert found.host == client.getsockname()[0]
            assert (found.local_port, found.port) == (
                listener.getsockname()[1],
                client.getsockname()[1],
            )
            assert listening_port(listener.fileno()) == found.local_port
            assert listening_port(server.fileno()) is None
            assert connection_of(listener.fileno()) is None


def test_bytes_are_counted_as_they_come_read_or_not() -> None:
    with listening("127.0.0.1") as listener, connected(listener) as (client, server):
        client.sendall(b"a" * 1000)
        assert server.recv(10)
        server.sendall(b"b" * 77)
        assert client.recv(100)
        assert acked_and_received(server.fileno()) == (77, 1000)


def test_a_descriptor_that_is_another_file_by_now_is_not_borrowed() -> None:
    with listening("127.0.0.1") as listener:
        with connected(listener) as (_, server):
            fd, cookie = server.fileno(), cookie_of(server.fileno())
            assert cookie is not None
            with borrowed(fd, cookie) as own:
                assert own != fd
                assert connection_of(own) == connection_of(fd)
        with socket.socket() as other:
            os.dup2(other.fileno(), fd)
            with pytest.raises(OSError, match="closed meanwhile"), borrowed(fd, cookie):
                pass
            os.close(fd)


def test_an_ended_connection_has_nothing_left_to_read() -> None:
    with listening("127.0.0.1") as listener, connected(listener) as (client, server):
        client.sendall(b"a" * 100_000)
        end(server.fileno())
        assert server.recv(10) == b""
        assert client.recv(10) == b""


@pytest.mark.parametrize("others", [[], ["10.0.0.1", "2001:db8::1", "127.0.0.4"]])
def test_only_those_who_are_shut_out_cannot_connect(others: list[str]) -> None:
    with listening("127.0.0.1") as listener:
        shut_out(listener.fileno(), [*others, "127.0.0.2"])
        assert not is_let_in(listener, "127.0.0.2")
        assert is_let_in(listener, "127.0.0.1")
        assert is_let_in(listener, "127.0.0.3")
        shut_out(listener.fileno(), others)
        assert is_let_in(listener, "127.0.0.2")
        shut_out(listener.fileno(), [])
        shut_out(listener.fileno(), [])


def test_a_network_of_ipv6_is_shut_out_as_one() -> None:
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listening("::1"))
        except OSError:
            pytest.skip("this machine has no IPv6")
        shut_out(listener.fileno(), ["2001:db8::1", "127.0.0.1"])
        assert is_let_in(listener, "::1")
        shut_out(listener.fileno(), ["2001:db8::1", "::ffff"])  # Same first 64 bits as ::1.
        assert not is_let_in(listener, "::1")
