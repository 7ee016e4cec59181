"""Two applications never share a port, although their socket options would allow it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy import port_claims
from quire.cluster.deploy.port_claims import claim_ports
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
PORT = 20000 + os.getpid() % 10000
"""A port for claims; nothing listens there, since claims concern numbers only."""


def claim(owner: str, *, host: str = "127.0.0.1", port: int = PORT) -> contextlib.ExitStack:
    config = ClusterConfig(
        engine=EngineConfig(model=Path("model")), host=host, grpc_port=port, http_port=0
    )
    return claim_ports(config, owner=lambda: owner)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_another_application_is_refused_a_port_until_its_owner_ends(host: str) -> None:
    message = f"grpc_port={PORT}: the application 'first' has this port"
    with claim("first@cluster", host=host):
        with pytest.raises(ConfigError, match=message):
            claim("second@cluster")
        with pytest.raises(ConfigError, match=message):
            claim("first@another cluster")
    claim("second@cluster").close()


def test_one_application_shares_its_port_among_processes() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.cluster.test_port_claims import PORT, claim
with claim("first@cluster", port={PORT}):
    pass
"""
    with claim("first@cluster"):
        subprocess.run([sys.executable, "-c", code], check=True)


def test_other_addresses_and_any_free_port_are_no_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    with claim("first@cluster"), claim("second@cluster", host="127.0.0.2"):
        pass
    monkeypatch.setattr(port_claims, "_claim", lambda *_: pytest.fail("nothing to claim"))
    claim("first@cluster", port=0).close()
