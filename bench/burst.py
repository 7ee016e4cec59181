"""A burst on a new server: ``quire serve MODEL`` with default flags, N requests at once over HTTP.

    python -m bench.burst MODEL [--sizes 32 128 256] [--prompt-tokens 340] [--max-tokens 64]

No two prompts share a prefix. No request may be refused: a server waits as long as its clients do.
"""

import asyncio
import time
from collections import Counter
from statistics import median

import httpx
from bench.report import command
from bench.servers import serving


def main() -> None:
    parser = command("bench.burst", __doc__)
    parser.add_argument("model", help="what quire serve takes")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--prompt-tokens", type=int, default=340)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    with serving(arguments.model) as addresses:
        for size in arguments.sizes:
            asyncio.run(burst(addresses.http, size, arguments.prompt_tokens, arguments.max_tokens))


async def burst(url: str, size: int, prompt_tokens: int, max_tokens: int) -> None:
    bodies = [
        {
            "prompt": [1000 + number, *range(1000, 999 + prompt_tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        for number in range(size)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as client:
        begin_s = time.monotonic()

        async def ask(body: dict[str, object]) -> tuple[int, float]:
            response = await client.post(f"{url}/v1/completions", json=body)
            return response.status_code, time.monotonic() - begin_s

        answers = await asyncio.gather(*map(ask, bodies))
    statuses = dict(Counter(status for status, _ in answers))
    ends_s = [end_s for _, end_s in answers]
    print(
        f"{size} at once: statuses {statuses}, answered after {median(ends_s):.1f} s (median), "
        f"{max(ends_s):.1f} s (last)",
        flush=True,
    )


if __name__ == "__main__":
    main()
