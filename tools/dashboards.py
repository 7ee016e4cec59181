"""Runs the queries of third-party dashboards and autoscalers against a live Prometheus and server.

    python -m tools.dashboards FILE… --server http://127.0.0.1:8000 --prometheus /usr/bin/prometheus

FILEs are Grafana's dashboards (JSON) and KEDA's objects (YAML), such as those in the `vllm` source
distribution (`python -c "from tools.strangers import sdist; print(sdist('vllm'))"`) and in
production-stack's repository. It prints how many of each file's queries have data, and those that
have none. `promtool`, beside `prometheus`, checks the server's metrics.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

_PORT = 9099
_JOB = "quire"
_LOAD_S = 25.0
_VARIABLES = {
    "__rate_interval": "15s",
    "__interval": "15s",
    "__range": "1m",
    "__auto": "15s",
    "job": _JOB,
}
"""Values of Grafana's variables and of ours; other variables are replaced by a model's name."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="one that is running")
    parser.add_argument("--prometheus", default="prometheus", help="the program")
    arguments = parser.parse_args()
    model = httpx.get(f"{arguments.server}/v1/models").json()["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(8) as pool:
        process = _prometheus(arguments.prometheus, arguments.server, Path(folder))
        try:
            end_s = time.monotonic() + _LOAD_S
            loads = [pool.submit(_load, arguments.server, end_s) for _ in range(8)]
            time.sleep(_LOAD_S - 2)
            for file in arguments.files:
                _report(file, model)
            for load in loads:
                load.result()
        finally:
            process.terminate()
            process.wait()
    return _check_metrics(arguments.prometheus, arguments.server)


def _prometheus(program: str, server: str, folder: Path) -> "subprocess.Popen[bytes]":
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": _JOB, "static_configs": [{"targets": [urlsplit(server).netloc]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        [
            program,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{_PORT}",
            "--log.level=error",
        ]
    )


def _load(server: str, end_s: float) -> None:
    with httpx.Client(base_url=server, timeout=None) as client:
        while time.monotonic() < end_s:
            body = {"prompt": "The capital of France is", "max_tokens": 64}
            client.post("/v1/completions", json=body).raise_for_status()


def _report(file: Path, model: str) -> None:
    found = [(query, _num_series(_filled_in(query, model))) for query in _queries(file)]
    with_data = [query for query, num in found if num]
    print(f"{file.name}: {len(with_data)} of {len(found)} queries have data")
    for query, num in found:
        if not num:
            print(f"  none: {' '.join(query.split())}")


def _queries(file: Path) -> Iterator[str]:
    """The distinct ``expr`` of a dashboard's targets and ``query`` of KEDA's triggers."""
    text = file.read_text()
    is_dashboard = file.suffix == ".json"
    documents = [json.loads(text)] if is_dashboard else yaml.safe_load_all(text)
    wanted = "expr" if is_dashboard else "query"
    yield from dict.fromkeys(query for each in documents for query in _named(wanted, each))


def _named(wanted: str, value: Any) -> Iterator[str]:
    """The strings under the key ``wanted``, at any depth."""
    if isinstance(value, dict):
        for name, below in value.items():
            if name == wanted and isinstance(below, str):
                yield below
            else:
                yield from _named(wanted, below)
    elif isinstance(value, list):
        for below in value:
            yield from _named(wanted, below)


def _filled_in(query: str, model: str) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda each: _VARIABLES.get(each[1], model), query)


def _num_series(query: str) -> int:
    """The number of series whose value is a number."""
    url = f"http://127.0.0.1:{_PORT}/api/v1/query"
    answer = httpx.get(url, params={"query": query}).json()
    if answer["status"] != "success":
        raise ValueError(f"{query}: {answer['error']}")
    return sum(each["value"][1] != "NaN" for each in answer["data"]["result"])


def _check_metrics(program: str, server: str) -> int:
    """Checks metrics with promtool, except those with vLLM's names, whose colons it rejects."""
    lines = httpx.get(f"{server}/metrics").text.splitlines(keepends=True)
    ours = "".join(line for line in lines if not re.match(r"(# (HELP|TYPE) )?vllm:", line))
    promtool = str(Path(program).with_name("promtool"))
    told = subprocess.run([promtool, "check", "metrics"], input=ours.encode(), check=False)
    print("promtool check metrics:", "clean" if told.returncode == 0 else "see above")
    return told.returncode


if __name__ == "__main__":
    sys.exit(main())
