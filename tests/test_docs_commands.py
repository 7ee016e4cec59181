"""The commands and programs on documentation pages do what the pages say.

Blocks marked as ``sh`` or ``python`` are run here, with the demo model in place of the hub's and
free ports in place of the usual ones. Pages in `ELSEWHERE` are run by the test named there.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from tests.page_blocks import ROOT, Block, blocks, environment
from tests.served.serve_process import serving

from quire import demo_model

PAGES = (
    "docs/quickstart.md",
    "docs/guide.md",
    "docs/several-models.md",
    "docs/adapters.md",
    "docs/embeddings.md",
    "docs/several-nodes.md",
    "docs/from-vllm.md",
)
HERE = ("docs/quickstart.md", "docs/guide.md")
ELSEWHERE = {
    "docs/several-models.md": "tests/served/test_model_changes.py runs its commands",
    "docs/adapters.md": "tests/cluster/features/adapters/test_adapters_served.py runs its program",
    "docs/embeddings.md": "tests/cluster/features/embeddings/test_embeddings.py runs its program",
    "docs/several-nodes.md": "tests/nodes/test_page.py runs its commands, on hosts of their own",
    "docs/from-vllm.md": "tests/cluster/test_vllm_flags.py checks every flag of vLLM",
}
NOT_RUN = {
    "python3 -m venv": "`make test-python` installs, as that takes minutes and gigabytes",
    "pip install": "`make test-python` installs, as that takes minutes and gigabytes",
    "uv pip install": "`make test-python` installs, as that takes minutes and gigabytes",
    "quire run-batch": "tests/cluster/tools/test_run_batch.py runs it, on requests of its own",
    ".venv/bin/quire serve": "tests/served/test_served.py serves from two groups of two ranks",
    ".venv/bin/quire bench prefix": "tests/worker/bench runs it, on requests of its own",
    ".venv/bin/quire simulate": "tests/router/simulate replays a log of its own",
}
"""Beginnings of blocks that are not run, with the reason."""
SMALL = "kv_cache_memory_bytes=33554432, num_threads=1"


class Served(NamedTuple):
    grpc: str
    http: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("--num-threads", "1") as (server, grpc, http):
        yield Served(grpc, http, environment(tmp_path_factory.mktemp("commands")))
        server.send_signal(2)  # SIGINT, as from Ctrl-C.
        assert server.wait(timeout=120) == 0


RUN = [(page, block) for page in HERE for block in blocks(page, "sh", "python")]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "block"), RUN, ids=[f"{Path(page).stem}-{n}" for n, (page, _) in enumerate(RUN)]
)
def test_a_block_of_a_page_does_what_it_says(
    page: str, block: Block, served: Served, tmp_path: Path
) -> None:
    for beginning, reason in NOT_RUN.items():
        if block.text.startswith(beginning):
            pytest.skip(reason)
    if block.text.strip() == "quire serve":
        assert httpx.get(f"http://{served.http}/v1/models").status_code == 200
        return
    text = here(block.text, served)
    command = ["sh", "-euc", text] if block.language == "sh" else [sys.executable, "-c", text]
    if "curl " in text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env=served.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip()
    assert '"error"' not in told.stdout


def here(text: str, served: Served) -> str:
    """A block with this machine's values in place of the reader's."""
    text = text.replace("127.0.0.1:8000", served.http).replace("127.0.0.1:50051", served.grpc)
    text = text.replace('"Qwen/Qwen3-0.6B", max_model_len=8192', f'"{demo_model.PATH}"')
    text = re.sub(r"block_size=16", f"block_size=16, {SMALL}", text)
    text = text.replace("quire generate", f"quire generate --address {served.grpc}")
    return text.replace(".venv/bin/quire", "quire")


@pytest.mark.parametrize("page", ["README.md", *HERE])
def test_a_page_asks_for_the_models_that_it_serves(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    served = set(re.findall(r"quire serve ([^\s`-]\S*)", text))
    assert set(re.findall(r'model="([^"]+)"', text)) <= served


def test_each_reason_is_for_a_block_and_names_what_runs_it() -> None:
    for beginning, reason in NOT_RUN.items():
        assert any(block.text.startswith(beginning) for _, block in RUN), beginning
        for path in re.findall(r"tests/[\w/.]*\w", reason):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_each_page_is_run_somewhere(page: str) -> None:
    assert (page in HERE) != (page in ELSEWHERE)
    if page in ELSEWHERE:
        file = re.findall(r"tests/\S+\.py", ELSEWHERE[page])[0]
        assert (ROOT / file).exists()
