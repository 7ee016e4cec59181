import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("link", [[], ["--tls"]], ids=["plain", "tls"])
def test_the_relay_can_be_measured_though_its_engine_is_a_clock(link: list[str]) -> None:
    flags = ["--streams", "2", "--tokens", "5", "--repeats", "1", *link]
    done = subprocess.run(
        [sys.executable, "-m", "bench.relay", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "group: frames to the gateway" in done.stdout
