"""Waits until a gateway has no request left: ``python -m quire.cluster.deploy.wait_idle URL``.

It is for the preStop hook of a gateway's pod. The pod gets no new clients by then; its current
clients can finish.
"""

import argparse
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from math import inf

_INFLIGHT = re.compile(r"^quire_inflight_completions(?:\{.*\})? (\S+)$", re.MULTILINE)
_LOOK_EVERY_S = 0.5
_ANSWER_WITHIN_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the gateway is idle or gone, 1 when requests are left at the end."""
    parser = argparse.ArgumentParser(prog="quire.cluster.deploy.wait_idle", description=__doc__)
    parser.add_argument(
        "url",
        help="where the gateway answers /metrics without a key, such as http://127.0.0.1:9464",
    )
    parser.add_argument("--timeout-s", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    deadline_s = time.monotonic() + arguments.timeout_s
    while num_inflight := _num_inflight(arguments.url):
        if time.monotonic() > deadline_s:
            is_silent = num_inflight == inf
            why = (
                "the gateway does not tell" if is_silent else f"{num_inflight:g} requests are left"
            )
            print(f"{why} after {arguments.timeout_s:g} s")
            return 1
        time.sleep(_LOOK_EVERY_S)
    return 0


def _num_inflight(url: str) -> float:
    """The gateway's requests in progress; infinite if it runs but does not answer in time."""
    # The certificate names the service and not this pod; nothing secret is sent.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(
            f"{url}/metrics", timeout=_ANSWER_WITHIN_S, context=context
        ) as answer:
            found = _INFLIGHT.findall(answer.read().decode())  # One for each model.
    except (TimeoutError, urllib.error.HTTPError):
        return inf
    except (http.client.HTTPException, OSError) as error:
        return inf if isinstance(getattr(error, "reason", None), TimeoutError) else 0.0
    return sum(map(float, found))


if __name__ == "__main__":
    raise SystemExit(main())
