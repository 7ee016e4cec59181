"""How long Ray takes to give up on a node that was cut off: its own settings against the chart's.

    python -m bench.lost_node

Needs root, iproute2 and nftables: the nodes are network namespaces, and their link is cut.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.namespaces import Network
from bench.ray_hosts import ENVIRONMENT, RayHosts

# Prints a line when all nodes are there, and one when one of them is not any more.
_WATCH = """
import sys, time, ray
from quire.cluster.local import ray_session
with ray_session(address=sys.argv[1]):
    for wanted in (2, 1):
        while sum(node["Alive"] for node in ray.nodes()) != wanted:
            time.sleep(0.1)
        print(wanted, flush=True)
"""


def main() -> None:
    chart = {name: value for name, value in ENVIRONMENT.items() if "health_check" in name}
    for label, settings in (("chart", chart), ("Ray's own", dict.fromkeys(chart))):
        print(f"{label:10} {time_to_loss_s(settings):5.1f} s", flush=True)


def time_to_loss_s(settings: Mapping[str, str | None]) -> float:
    """Seconds from the cut to the news of it; ``None`` unsets a variable."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    try:
        with Network(["head", "worker"]) as network, RayHosts(network, folder) as ray:
            for name, value in settings.items():
                if value is None:
                    del ray.environment[name]
                else:
                    ray.environment[name] = value
            ray.start_head("head")
            ray.start_node("worker", {})
            watch = ray.start("head", _WATCH, ray.address)
            assert watch.stdout is not None
            watch.stdout.readline()
            network.cut("head", "worker")
            begin = time.monotonic()
            watch.stdout.readline()
            return time.monotonic() - begin
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
