import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_what_large_requests_do_can_be_measured() -> None:
    flags = ["--requests", "2", "--megabytes", "0.2", "--only", "prompts", "--only", "unknown keys"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.ingress", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "2 × 400" in done.stdout  # 200 kB of text are too many tokens.
    assert "1 × 400" in done.stdout  # The first of 17,000 keys that nobody knows is refused.
