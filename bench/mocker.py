"""The simulator beside Dynamo's own: the same traces, costs and policies through both.

    python -m venv DYNAMO && DYNAMO/bin/pip install ai-dynamo-runtime
    python -m bench.mocker --python DYNAMO/bin/python [--data FOLDER] [--groups N]

Dynamo's is `run_mocker_trace_replay`, written in Rust by others: what both say is no slip of ours.
Policies are round robin and Dynamo's KV router with its default weight and with 20. Each cell:
mean TTFT in s and the share of tokens found, theirs and ours, and the ratio of the means.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace_files import MOONCAKE_BLOCK_SIZE, load_trace

TRACES = {
    "mooncake_conversation_trace.jsonl": (6.0, 9.0, 11.5),
    "multitenant_like.jsonl": (8.0, 15.0, 20.0),
}
POLICIES = {"round_robin": None, "dynamo": 1.0, "dynamo_20": 20.0}

REPLAY = """
import json, sys
from dynamo.llm import KvRouterConfig
from dynamo._core import run_mocker_trace_replay
call = json.loads(sys.argv[1])
weight = call.pop("weight")
if weight is not None:
    call.update(router_mode="kv_router", router_config=KvRouterConfig(prefill_load_scale=weight))
result = run_mocker_trace_replay(**call, capture_planner_details=False)
summary = result.summary() if callable(result.summary) else result.summary
print("summary", json.dumps(dict(summary), default=str))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="of a venv that has Dynamo")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="has traces/")
    parser.add_argument("--groups", type=int, default=16)
    arguments = parser.parse_args()
    if not arguments.python.exists():
        print(f"skipped: {arguments.python} does not exist; make it as the first line of --help")
        return 0
    print(f"{'trace':>28} {'speed':>6} {'policy':>12} {'theirs':>16} {'ours':>16} {'ratio':>6}")
    for file, speeds in TRACES.items():
        path = arguments.data / "traces" / file
        if not path.exists():
            print(f"{file}: skipped, {path} does not exist (say --data FOLDER)")
            continue
        for speed in speeds:
            for policy in POLICIES:
                _compare(path, speed, policy, arguments)
    return 0


def _compare(path: Path, speed: float, policy: str, arguments: argparse.Namespace) -> None:
    config = SimulationConfig(num_groups=arguments.groups, policy=policy)
    theirs = _replay(arguments.python, path, speed, policy, config)
    ours = simulate(load_trace(path).at_speed(speed), config)
    mean = theirs["mean_ttft_ms"] / 1000
    hit_rate = theirs["first_admission_prefix_cache_reused_ratio"]
    print(
        f"{path.stem:>28} {speed:>6} {policy:>12} {mean:>7.3f} s {100 * hit_rate:>5.1f}% "
        f"{ours.ttft_s.mean():>7.3f} s {100 * ours.hit_rate:>5.1f}% "
        f"{ours.ttft_s.mean() / mean:>6.2f}",
        flush=True,
    )


def _replay(
    python: Path, path: Path, speed: float, policy: str, config: SimulationConfig
) -> dict[str, Any]:
    engine = {
        "num_gpu_blocks": config.cost.num_cache_tokens // MOONCAKE_BLOCK_SIZE,
        "block_size": MOONCAKE_BLOCK_SIZE,
        "max_num_batched_tokens": config.engine.chunk_tokens,
        "max_num_seqs": config.engine.max_num_seqs,
    }
    call = {
        "trace_files": [str(path)],
        "extra_engine_args": {"engine": engine},
        "num_workers": config.num_groups,
        "arrival_speedup_ratio": speed,
        "trace_block_size": MOONCAKE_BLOCK_SIZE,
        "weight": POLICIES[policy],
    }
    done = subprocess.run(
        [python, "-c", REPLAY, json.dumps(call)],
        capture_output=True,
        text=True,
        check=False,
        env={"DYN_LOG": "error"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("summary ")]
    if not lines:
        sys.exit(f"Dynamo's replay failed: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(lines[0].removeprefix("summary "))
    return summary


if __name__ == "__main__":
    sys.exit(main())
