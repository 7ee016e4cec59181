"""Lists the source files that one request passes through: ``python -m tools.crossing``.

A gateway and a group of one rank run in this process, without Ray. One chat is sent over HTTP, and
the file of every Quire function that is called meanwhile is recorded. Heartbeats and other
background work during that time are included.
"""

import argparse
import asyncio
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.group.server import GroupServer
from quire.worker.request.config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / name) for name in ("cluster", "kernels", "router", "worker"))
TOKENIZED = ("limits.py", "check_request")
"""The first function that is called with a tokenized prompt."""
AT_THE_ENGINE = ("engine.py", "add_request")


class Calls:
    """Quire's files whose functions were called, in the order of their first call."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.between: dict[str, None] = {}
        """Files called after the tokenizer and before the engine."""
        self.is_on = False
        self._is_tokenized = self._is_at_the_engine = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.is_on or event != "call":
            return
        code: CodeType = frame.f_code
        if not code.co_filename.startswith(OURS):
            return
        name = (Path(code.co_filename).name, code.co_name)
        self._is_tokenized |= name == TOKENIZED
        file = str(Path(code.co_filename).relative_to(ROOT))
        self.files[file] = None
        if self._is_tokenized and not self._is_at_the_engine:
            self.between[file] = None
        self._is_at_the_engine |= self._is_tokenized and name == AT_THE_ENGINE


async def cross(model: Path) -> Calls:
    calls = Calls()
    threading.setprofile(calls.profile)  # Profiles threads that start from now on.
    sys.setprofile(calls.profile)
    engine = EngineConfig(model=model, device="cpu", num_blocks=64, num_threads=1)
    config = ClusterConfig(engine=engine, http_port=0, grpc_port=0)
    group = await GroupServer.start(config, group_id="g0")
    gateway = await GatewayServer.start(config)
    gateway.set_groups([group.contact])
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"http://{gateway.http_address}/v1/chat/completions"
        body = {
            "messages": [{"role": "user", "content": "What is a block table?"}],
            "max_tokens": 8,
            "temperature": 0.5,
            "stream": True,
        }
        while not gateway.models.is_ready:
            await asyncio.sleep(0.05)
        (await client.post(url, json=body)).raise_for_status()  # One-time work is not counted.
        calls.is_on = True
        (await client.post(url, json=body)).raise_for_status()
        calls.is_on = False
    await gateway.stop(drain_timeout_s=0)
    await group.stop(drain_timeout_s=0)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model.PATH)
    parser.add_argument("--list", action="store_true", help="name the files")
    arguments = parser.parse_args()
    calls = asyncio.run(cross(arguments.model))
    for title, files in (
        ("one chat over HTTP", calls.files),
        ("between its tokenized prompt and the engine", calls.between),
    ):
        lines = {file: len((ROOT / file).read_text().splitlines()) for file in files}
        print(f"{title}: {len(lines)} files, {sum(lines.values()):,} lines")
        if arguments.list:
            for file, count in lines.items():
                print(f"  {count:5} {file}")


if __name__ == "__main__":
    main()
