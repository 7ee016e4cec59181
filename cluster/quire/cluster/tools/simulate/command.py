"""The flags of ``quire simulate``, which replays a trace without a model or a cluster."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cluster.cli.help import Parser, finite
from quire.worker.request.errors import ConfigError

if TYPE_CHECKING:
    from quire.simulate.cost import CostModel
    from quire.simulate.trace import Trace


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Replays a request trace against simulated groups: how long requests wait for "
        "their first token, by routing policy, number of groups and speed. No model runs; the "
        "routing and the cache are the real ones. docs/simulator.md says more."
    )
    parser.add_argument("trace", type=Path, help="a trace, or a log of your own")
    add = parser.add_argument_group("trace").add_argument
    add(
        "--format",
        choices=("mooncake", "azure", "log", "requests"),
        help="mooncake is .jsonl and azure .csv; by the file's name if absent; requests is a "
        "workload as `quire bench` reads it, with arrival_s in each line",
    )
    add(
        "--model",
        type=Path,
        help="checkpoint directory, GGUF file or ORG/NAME[@REVISION] of the Hugging Face hub, "
        "whose tokenizer and chat template read requests; the demo model's if absent",
    )
    add("--output-len", type=int, default=128, help="output tokens of requests that give none")
    add("--block-size", type=int, help="tokens that a block of the trace stands for")
    add("--num-requests", type=int, help="replay only the first N requests")
    add("--spread-ms", type=finite, default=0.0, help="delay arrivals by a random time up to this")

    add = parser.add_argument_group("what to compare").add_argument
    add("--policy", nargs="+", default=["prefix_aware"], help="routing policies; 'all' of them")
    add("--num-groups", type=int, nargs="+", default=[16], help="replica groups")
    add("--speed", type=finite, nargs="+", default=[1.0], help="replay this many times as fast")
    add(
        "--ttft-target-s",
        type=finite,
        help="instead of --speed, find the fastest one at which 99%% of requests wait no longer",
    )

    add = parser.add_argument_group("groups").add_argument
    add("--cost", default="h100-8b", help="a preset: h100-8b, h200-70b-tp4 or cpu-125m")
    add(
        "--fit",
        type=Path,
        nargs="+",
        help="JSON of `bench.step_times`, instead of a preset",
    )
    add("--cache-tokens", type=int, help="KV cache of a group; the preset's if absent")
    add(
        "--shared-read",
        type=finite,
        help="cost of attending to a shared prefix for each further decode of a step, as a share "
        "of the first one's: 1 if each reads it for itself, 0 if one reads it for all; the "
        "preset's or fitted one if absent",
    )
    add("--chunk-tokens", type=int, default=8192, help="tokens in a step")
    add("--max-num-seqs", type=int, default=1024, help="sequences that run at the same time")
    add(
        "--order",
        choices=("fcfs", "srpf"),
        default="fcfs",
        help="order of arrival, or shortest remaining prefill first, as Quire's engine does",
    )
    add(
        "--eviction",
        choices=("plain-lru", "utility"),
        default="plain-lru",
        help="utility is the engine's own policy; plain-lru is three times as fast to simulate",
    )

    add = parser.add_argument_group("KV offloading and transfer").add_argument
    add(
        "--link",
        default="none",
        help="links between groups: 25g, 100g or 400g (bits per second), or gigabytes per second; "
        "if absent, groups do not fetch from each other",
    )
    add("--transfer-ms", type=finite, default=2.0, help="time until a source's first byte")
    add("--host-tokens", type=int, default=0, help="tokens of KV that a group's host memory holds")
    add("--host-gb-s", type=finite, default=50.0, help="rate between host memory and KV cache")

    add = parser.add_argument_group("what goes wrong").add_argument
    add("--num-gateways", type=int, default=1, help="gateways, which do not communicate")
    add("--event-lag-s", type=finite, default=0.0, help="delay of block events")
    add("--event-loss", type=finite, default=0.0, help="share of block events that are lost")
    add(
        "--slow-factor",
        type=finite,
        default=1.0,
        help="slow down every fourth group by this factor",
    )
    add(
        "--contention",
        type=finite,
        default=0.0,
        help="for groups that share cores: 0.2 makes a step a fifth longer per other busy group",
    )

    add = parser.add_argument_group("run").add_argument
    add("--seed", type=int, default=0, help="seed of lost events and random delays")
    add("--output", type=Path, help="path and stem of a JSON file and a plot")
    add("--plot-format", choices=("png", "svg"), default="png", help="plot format")
    parser.set_defaults(run=_simulate)


def _simulate(arguments: argparse.Namespace) -> int:
    from quire.simulate.baselines import SIMULATED_POLICIES
    from quire.simulate.command import Sweep, run_command
    from quire.simulate.engine_config import SimulatedEngine
    from quire.simulate.run import SimulationConfig
    from quire.simulate.travel import TravelConfig

    if arguments.event_lag_s < 0:
        raise ConfigError(f"event_lag_s={arguments.event_lag_s}: must not be negative")
    sweep = Sweep(
        base=SimulationConfig(
            num_gateways=arguments.num_gateways,
            cost=_cost(arguments),
            engine=SimulatedEngine(
                chunk_tokens=arguments.chunk_tokens,
                max_num_seqs=arguments.max_num_seqs,
                order=arguments.order,
            ),
            eviction=arguments.eviction,
            event_lag_ms=1000 * arguments.event_lag_s,
            event_loss=arguments.event_loss,
            slow_factor=arguments.slow_factor,
            contention=arguments.contention,
            seed=arguments.seed,
            travel=TravelConfig(
                transfer_gb_s=_link_gb_s(arguments.link),
                transfer_ms=arguments.transfer_ms,
                host_gb_s=arguments.host_gb_s,
                host_tokens=arguments.host_tokens,
            ),
        ),
        policies=list(SIMULATED_POLICIES) if arguments.policy == ["all"] else arguments.policy,
        group_counts=arguments.num_groups,
        speeds=arguments.speed,
        ttft_target_s=arguments.ttft_target_s,
    )
    trace = _trace(arguments)
    if arguments.num_requests is not None:
        if arguments.num_requests < 1:
            raise ConfigError(f"num_requests={arguments.num_requests}: must be 1 or more")
        trace = trace.first(arguments.num_requests)
    if arguments.spread_ms < 0:
        raise ConfigError(f"spread_ms={arguments.spread_ms}: must not be negative")
    if arguments.spread_ms:
        trace = trace.spread(seed=arguments.seed, within_ms=arguments.spread_ms)
    return run_command(sweep, trace, output=arguments.output, plot_format=arguments.plot_format)


def _link_gb_s(link: str) -> float:
    """The rate of ``link``. Raises ConfigError if it is neither a preset nor a rate."""
    from quire.simulate.travel import LINKS_GB_S

    if link == "none":
        return 0.0
    try:
        return LINKS_GB_S[link] if link in LINKS_GB_S else finite(link)
    except (ValueError, argparse.ArgumentTypeError):
        names = ", ".join(LINKS_GB_S)
        raise ConfigError(
            f"link={link!r}: must be one of none, {names}, or gigabytes a second"
        ) from None


def _trace(arguments: argparse.Namespace) -> "Trace":
    from quire import demo_model
    from quire.cluster.tools.simulate.requests import trace_of_requests
    from quire.simulate.trace_files import load_trace
    from quire.worker.model.hub import fetch_text_files

    if arguments.format != "requests":
        return load_trace(arguments.trace, format=arguments.format, block_size=arguments.block_size)
    return trace_of_requests(
        arguments.trace,
        model=fetch_text_files(arguments.model or demo_model.PATH),
        block_size=16 if arguments.block_size is None else arguments.block_size,
        output_len=arguments.output_len,
    )


def _cost(arguments: argparse.Namespace) -> "CostModel":
    cost = _measured_cost(arguments)
    if arguments.shared_read is None:
        return cost
    return replace(cost, shared_read=arguments.shared_read)


def _measured_cost(arguments: argparse.Namespace) -> "CostModel":
    from quire.simulate.cost import PRESETS
    from quire.simulate.fit import fit_cost

    if arguments.fit:
        if arguments.cache_tokens is None:
            raise ConfigError("cache_tokens: --fit needs --cache-tokens N, a group's KV cache")
        return fit_cost(arguments.fit, num_cache_tokens=arguments.cache_tokens)
    if arguments.cost not in PRESETS:
        raise ConfigError(f"cost={arguments.cost!r}: must be one of {', '.join(PRESETS)}")
    cost = PRESETS[arguments.cost]
    if arguments.cache_tokens is None:
        return cost
    if arguments.cache_tokens < 1:
        raise ConfigError(f"cache_tokens={arguments.cache_tokens}: must be 1 or more")
    return replace(cost, num_cache_tokens=arguments.cache_tokens)
