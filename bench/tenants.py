"""Tests fairness: nine tenants beside a tenth one that requests a hundred times as much.

    python -m bench.tenants

Gateways in this process and two replica groups in processes of their own, with the demo model; the
clients of each tenant take the gateways in turn. Each step of a group takes
at least ``--step-s``, so that the groups are the limit and not this machine. A first phase
saturates the groups; the requests that end per second are the *capacity*. Each small tenant then
asks for 0.8 of its share, which is a tenth of that, in an open loop. Its arrivals are the same in
each phase:

    without   the nine small tenants alone
    beside    with the greedy one
    as one    the same, but all keys are of one tenant, as if there were no shares

The throughput of a tenant is the output tokens that it was sent per second. What waits at the end
of a phase is missing in it, so the time until the first token is told too; of a request that waits
at the end, it is the time until that. Where this process takes a whole core, it is the limit, and
not the groups: the cores are printed.

    python -m bench.tenants --crowd 200 1500 --step-s 0 --max-num-seqs 128 --duration-s 20

measures 19 tenants of a client each beside one with many clients (`bench.tenant_crowd`).
"""

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, quantiles
from tempfile import TemporaryDirectory

from bench import tenant_crowd
from bench.report import command, markdown
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream, run

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.garbage import collect_seldom
from quire.cluster.group.server import GroupServer
from quire.worker.request.config import EngineConfig

SMALL = [f"small{number}" for number in range(9)]
GREEDY = "greedy"
_SHARE = 0.8
_WARM_UP = 0.2
"""Share of a phase, at its start, that is not counted."""


_SHARED = "all"
"""A tenant whose key all use in the last phase."""


async def measure(options: argparse.Namespace, folder: Path) -> None:
    async with _servers(options, folder) as (addresses, http):
        if options.crowd:
            await tenant_crowd.measure(http, options, _key)
            return
        per_s = await _capacity_per_s(addresses, options)
        print(f"capacity: {per_s:.1f} requests/s", flush=True)
        rate = _SHARE * per_s / (len(SMALL) + 1)
        small = dict.fromkeys(SMALL, rate)
        both = small | {GREEDY: options.times * rate}
        without = await _phase(addresses, small, options)
        beside = await _phase(addresses, both, options)
        as_one = await _phase(addresses, both, options, as_one=True)
    rows = []
    for tenant, per_s in both.items():
        phases = [each.tokens_per_s.get(tenant, 0.0) for each in (without, beside, as_one)]
        kept = [f"{each / phases[0]:.3f}" if phases[0] else "" for each in phases[1:]]
        rows.append([tenant, f"{per_s:.2f}", *(f"{each:.1f}" for each in phases), *kept])
    head = ["tenant", "requests/s", "tokens/s without", "beside", "as one"]
    head += ["kept beside", "kept as one"]
    print(markdown(head, rows))
    for name, phase in (("without", without), ("beside", beside), ("as one", as_one)):
        kept_of_all = [phase.tokens_per_s[each] / without.tokens_per_s[each] for each in SMALL]
        print(
            f"{name}: small tenants kept at least {min(kept_of_all):.3f}, on average "
            f"{fmean(kept_of_all):.3f}; first token after {fmean(phase.waits_s):.2f} s on "
            f"average, p95 {quantiles(phase.waits_s, n=20)[-1]:.2f} s; all got "
            f"{sum(phase.tokens_per_s.values()):.0f} tokens/s; {phase.cores:.2f} cores"
        )


@dataclass(frozen=True)
class _Phase:
    tokens_per_s: dict[str, float]
    """Output tokens of each tenant."""
    waits_s: list[float]
    """The time until the first token, or the end, of each request of the small tenants."""
    cores: float
    """CPU cores that this process used."""


async def _capacity_per_s(addresses: Sequence[str], options: argparse.Namespace) -> float:
    """Completions per second while there is always more to do."""
    streams: list[Stream] = []
    seconds = options.duration_s / 2
    begin_s = time.monotonic()

    async def client(gateways: Gateways) -> None:
        while time.monotonic() < begin_s + seconds:
            streams.append(stream := Stream(request=_request(random.Random(1), 0.0, options)))
            await gateways.send(stream)

    async with _clients(addresses, GREEDY) as gateways:
        await asyncio.gather(*(client(gateways) for _ in range(8 * options.max_num_seqs)))
    errors = {each.error for each in streams if each.error}
    if errors:
        raise SystemExit(f"no capacity was measured: {errors}")
    first_s = begin_s + _WARM_UP * seconds
    ends = [first_s < each.ended_s <= begin_s + seconds for each in streams]
    return float(sum(ends) / ((1 - _WARM_UP) * seconds))


async def _phase(
    addresses: Sequence[str],
    rates: Mapping[str, float],
    options: argparse.Namespace,
    *,
    as_one: bool = False,
) -> _Phase:
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    found = await asyncio.gather(
        *(
            _load(addresses, tenant, per_s, options, shown_as=_SHARED if as_one else tenant)
            for tenant, per_s in rates.items()
        )
    )
    first_s, last_s = begin_s + _WARM_UP * options.duration_s, begin_s + options.duration_s
    cores = (time.process_time() - begin_cpu_s) / (time.monotonic() - begin_s)
    by_tenant = dict(zip(rates, found, strict=True))
    return _Phase(
        {
            tenant: sum(first_s < at_s <= last_s for each in streams for at_s in each.times)
            / (last_s - first_s)
            for tenant, streams in by_tenant.items()
        },
        [
            (each.times[0] if each.times else last_s) - each.sent_s
            for tenant in SMALL
            for each in by_tenant[tenant]
            if first_s < each.sent_s <= last_s
        ],
        cores,
    )


async def _load(
    addresses: Sequence[str],
    tenant: str,
    per_s: float,
    options: argparse.Namespace,
    *,
    shown_as: str,
) -> list[Stream]:
    rng, at_s, requests = random.Random(tenant), 0.0, []
    while (at_s := at_s + rng.expovariate(per_s)) < options.duration_s:
        requests.append(_request(rng, at_s, options))
    async with _clients(addresses, shown_as) as gateways:
        return await run(requests, gateways, limit_s=options.duration_s)


def _request(rng: random.Random, at_s: float, options: argparse.Namespace) -> Request:
    token_ids = [rng.randrange(100, 1000) for _ in range(options.prompt_tokens)]
    return Request(name="", token_ids=token_ids, max_tokens=options.output_tokens, at_s=at_s)


def _clients(addresses: Sequence[str], tenant: str) -> Gateways:
    return Gateways(addresses, metadata=[("authorization", f"Bearer {_key(tenant)}")])


@contextlib.asynccontextmanager
async def _servers(
    options: argparse.Namespace, folder: Path
) -> AsyncIterator[tuple[list[str], list[str]]]:
    """The gateways' addresses, for gRPC and for HTTP."""
    tenants = [*SMALL, GREEDY, _SHARED, *tenant_crowd.LIGHT, tenant_crowd.HEAVY]
    keys = [
        f'- {{name: {each}, tenant: {each}, hash: "sha256:{_hash(_key(each))}"}}'
        for each in tenants
    ]
    file = folder / "keys.yaml"
    file.write_text("\n".join(["tenants:", *(f"  {each}:" for each in tenants), "keys:", *keys]))
    config = ClusterConfig(
        engine=EngineConfig(
            model=demo_model.PATH, max_num_seqs=options.max_num_seqs, num_threads=1
        ),
        grpc_port=0,
        http_port=0,
        metrics_port=0,
        api_keys_file=file,
    )
    async with contextlib.AsyncExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        ends = []
        for number in range(2):
            end, other = spawn.Pipe()
            args = (config, f"g{number}", options.step_s, other)
            process = spawn.Process(target=_run_group, args=args, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(end.close)  # Which ends it.
            other.close()
            ends.append(end)
        contacts = [await asyncio.to_thread(each.recv) for each in ends]
        addresses, http = [], []
        for _ in range(options.num_gateways):
            gateway = await GatewayServer.start(config)
            stack.push_async_callback(gateway.stop, drain_timeout_s=0)
            gateway.set_groups(contacts)
            known = gateway.models.named(None).groups
            while known.num_ready < len(contacts):
                await known.wait_for_change(timeout_s=1)
            addresses.append(gateway.grpc_address)
            http.append(gateway.http_address)
        collect_seldom()  # As a gateway's process does.
        yield addresses, http


def _run_group(config: ClusterConfig, group_id: str, step_s: float, end: Connection) -> None:
    """Serves until the other end is closed."""
    asyncio.run(_serve_group(config, group_id, step_s, end))


async def _serve_group(
    config: ClusterConfig, group_id: str, step_s: float, end: Connection
) -> None:
    group = await GroupServer.start(config, group_id=group_id)
    _pace(group, step_s)
    end.send(group.contact)
    with contextlib.suppress(EOFError):
        await asyncio.to_thread(end.recv)
    await group.stop(drain_timeout_s=0)


def _pace(group: GroupServer, step_s: float) -> None:
    """Makes each step take at least ``step_s`` seconds."""
    engine = group._engine
    step = engine.step

    def paced_step():  # type: ignore[no-untyped-def]
        begin_s = time.monotonic()
        made = step()
        time.sleep(max(0.0, begin_s + step_s - time.monotonic()))
        return made

    engine.step = paced_step  # type: ignore[method-assign]


def _key(tenant: str) -> str:
    return f"key-of-{tenant}"


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def main() -> None:
    parser = command("bench.tenants", __doc__)
    add = parser.add_argument
    add("--duration-s", type=float, default=40.0, help="of a phase")
    add("--num-gateways", type=int, default=1)
    add("--times", type=float, default=100.0, help="what the greedy one asks for, of a small one's")
    add("--step-s", type=float, default=0.025)
    add("--max-num-seqs", type=int, default=4, help="of each group")
    add("--prompt-tokens", type=int, default=40)
    add("--output-tokens", type=int, default=16)
    add(
        "--crowd",
        type=int,
        nargs="+",
        help="instead: 19 tenants with a client each beside one with that many (`tenant_crowd`)",
    )
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
