"""Runs one engine's adapter in a process of its own, and answers jobs.

    python -P host.py adapters/NAME.py < jobs > results

One JSON object a line each way; needs only the standard library, as it runs in the peer's own
virtual environment. The first line in is the engine to load, and every other one a job:

    {"checkpoint": path, "dtype": "bfloat16" | "float32", "threads": n}
        -> {"versions": {...}}
    {"prompts": [[id, ...], ...], "before": [id, ...] | null, "new_tokens": n, "forget": bool}
        -> {"seconds": s, "token_ids": [[id, ...], ...]}

A job first empties the prefix cache (``forget``), then runs ``before`` if there is one, and then
times ``prompts``, all handed over together. An adapter is a module with

    def load(checkpoint: str, *, dtype: str, threads: int) -> Engine
    PACKAGES: tuple[str, ...]       # whose versions matter

where an Engine has ``generate(prompts, new_tokens) -> list of token ids for each prompt`` (greedy,
never stopping early) and ``forget()``. What an engine prints goes to stderr.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What engines print must not come between the results.
    adapter = _import(sys.argv[1])
    start = json.loads(sys.stdin.readline())
    engine = adapter.load(start["checkpoint"], dtype=start["dtype"], threads=start["threads"])
    versions = {name: importlib.metadata.version(name) for name in adapter.PACKAGES}
    _answer(results, {"versions": versions})
    for line in sys.stdin:
        _answer(results, _run(engine, json.loads(line)))


def _run(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    if job["forget"]:
        engine.forget()
    if job["before"] is not None:
        engine.generate([job["before"]], 1)
    begin = time.perf_counter()
    token_ids = engine.generate(job["prompts"], job["new_tokens"])
    return {"seconds": time.perf_counter() - begin, "token_ids": token_ids}


def _answer(results: TextIO, answer: dict[str, Any]) -> None:
    results.write(json.dumps(answer) + "\n")
    results.flush()


def _import(path: str) -> Any:
    """Imports by path: a module named like the engine it adapts must not hide it."""
    spec = importlib.util.spec_from_file_location("adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
