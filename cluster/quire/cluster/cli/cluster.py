"""The flags that describe a cluster, of ``quire serve`` and ``quire demo``, and what they make.

Defaults that `ClusterConfig` has are its own.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from quire.cluster.autoscaling.settings import AutoscalingSettings
from quire.cluster.cli.engine import add_engine_flags, engine_config
from quire.cluster.config import ClusterConfig
from quire.router.config import RoutingConfig
from quire.router.policy_names import POLICY_NAMES
from quire.worker.config import BLOCK_SIZES, EngineConfig, SchedulingPolicy
from quire.worker.errors import ConfigError


def add_cluster_flags(
    parser: argparse.ArgumentParser, *, num_groups: int, tensor_parallel_size: int
) -> None:
    """Adds them to a command, with its own defaults for these two."""
    parser.add_argument(
        "model", nargs="?", type=Path, help="a checkpoint directory; without one, the demo model"
    )
    add = parser.add_argument
    add("--served-model-name", help="what clients call the model; the directory's name if absent")
    add("--ray-address", help="of a running Ray cluster ('auto' finds it); else one starts here")
    _add_group_flags(parser, num_groups=num_groups)
    _add_network_flags(parser)
    _add_routing_flags(parser)
    _add_admission_flags(parser)
    _add_failover_flags(parser)
    _add_engine_flags(parser, tensor_parallel_size=tensor_parallel_size)


def _add_group_flags(parser: argparse.ArgumentParser, *, num_groups: int) -> None:
    add = parser.add_argument_group(
        "replica groups and gateways", "How many there are, and where."
    ).add_argument
    add("--num-groups", type=int, default=num_groups, help="replica groups, where it is fixed")
    add("--max-groups", type=int, help="start and stop groups with the load, up to so many")
    add("--min-groups", type=int, help="and down to so many; 0 stops the last one too; 1 if absent")
    add("--target-ttft-s", type=float, help="seconds that prompts may wait; 2 if absent")
    add(
        "--nodes-per-group",
        type=int,
        default=1,
        help="nodes that the ranks of a group are spread over",
    )
    add("--cpus-per-group", type=float, default=0.0, help="that Ray reserves; 0 counts no CPUs")
    add("--num-gateways", type=int, default=1, help="gateways")


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "network", "Where clients connect, and which of them are let in."
    ).add_argument
    add("--host", default="127.0.0.1", help="where clients connect; 0.0.0.0 serves the network")
    add("--grpc-port", type=int, default=50051, help="0 takes any free one")
    add("--http-port", type=int, default=8000, help="0 takes any free one")
    add(
        "--group-host",
        help="where groups listen for gateways; auto is the address of each one's node; if "
        "absent 127.0.0.1, with --ray-address auto",
    )
    add("--tls-certificate", type=Path, help="the gateways' certificate chain, PEM; with --tls-key")
    add("--tls-key", type=Path, help="its private key, PEM")
    add("--api-keys-file", type=Path, help="one API key a line: clients must then show one")
    add(
        "--allow-origin",
        action="append",
        metavar="ORIGIN",
        help="browsers may call from pages of this origin, such as http://localhost:3000; '*' is "
        "any; can be given several times",
    )


def _add_engine_flags(parser: argparse.ArgumentParser, *, tensor_parallel_size: int) -> None:
    """Those of a group's engine, with what only one that serves can be told."""
    add = add_engine_flags(
        parser, tensor_parallel_size=tensor_parallel_size, async_scheduling="on GPUs"
    ).add_argument
    add("--block-size", type=int, choices=BLOCK_SIZES, default=16, help="tokens in a KV block")
    add("--gpu-memory-utilization", type=float, help="share of GPU memory, or of free RAM")
    add("--kv-cache-memory-bytes", type=int, help="KV cache of each group, instead of a share")
    add("--max-model-len", type=int, help="longest prompt + output; the model's own if absent")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of prompts that begin alike",
    )
    add(
        "--scheduling-policy",
        choices=get_args(SchedulingPolicy),
        default=EngineConfig.scheduling_policy,
        help="whose prompt a group computes next: the first that came, or the one with the least "
        "left to compute",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--seed", type=int, default=0, help="for requests that bring none of their own")


def _add_routing_flags(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, what in POLICY_NAMES.items())
    add = parser.add_argument_group(
        "routing", f"Which group takes a request. The policies are {listed}."
    ).add_argument
    add(
        "--routing-policy",
        choices=POLICY_NAMES,
        default="prefix_aware",
        metavar="POLICY",
        help="one of these",
    )
    add(
        "--directory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="know what each group has cached; without, route by load alone",
    )


def _add_admission_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "admission",
        "Past these bounds a request is refused at once, and told when to come again; what was "
        "taken so keeps its latency. Both waits together make a cluster patient with bursts.",
    ).add_argument
    add(
        "--max-queue-wait-s",
        type=float,
        help="a request that would wait for longer for its turn is refused; 1 if absent, with "
        "--max-groups five times --target-ttft-s",
    )
    add(
        "--standing-wait-s",
        type=float,
        default=ClusterConfig.standing_wait_s,
        help="the same, where less, once no request has found a free group for so long",
    )
    add(
        "--max-queued-requests",
        type=int,
        default=ClusterConfig.max_queued_requests,
        help="completions that may wait at a gateway, whatever the time",
    )
    add(
        "--max-queued-tokens",
        type=int,
        default=ClusterConfig.max_queued_tokens,
        help="prompt tokens of these",
    )


def _add_failover_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "failover and the stop",
        "What a group runs goes on at another one when it is lost, or about to stop.",
    ).add_argument
    add(
        "--silence-timeout-s",
        type=float,
        default=ClusterConfig.silence_timeout_s,
        help="a group that a gateway does not hear for as long is lost",
    )
    add(
        "--step-deadline-s",
        type=float,
        default=ClusterConfig.step_deadline_s,
        help="and one that takes longer for a step; well above the longest prefill chunk",
    )
    add(
        "--max-group-deaths",
        type=int,
        default=ClusterConfig.max_group_deaths,
        help="groups that may die under one request until it is refused",
    )
    add(
        "--drain-timeout-s",
        type=float,
        default=ClusterConfig.drain_timeout_s,
        help="for running requests at the stop",
    )
    add(
        "--handover-s",
        type=float,
        default=ClusterConfig.handover_s,
        help="the last part of that, in which what still runs is moved to other groups",
    )


def cluster_config(arguments: argparse.Namespace) -> ClusterConfig:
    """What the flags say.

    Raises:
        ConfigError: They cannot work; the message names what and why.
    """
    name = arguments.served_model_name
    if arguments.model is None and not name:
        from quire import demo_model

        name = demo_model.NAME
    engine = replace(
        engine_config(arguments),
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        max_model_len=arguments.max_model_len,
        enable_prefix_caching=arguments.enable_prefix_caching,
        scheduling_policy=arguments.scheduling_policy,
        enforce_eager=arguments.enforce_eager,
        seed=arguments.seed,
    )
    return ClusterConfig(
        engine=engine,
        routing=RoutingConfig(policy=arguments.routing_policy, use_directory=arguments.directory),
        served_model_name=name,
        num_groups=arguments.num_groups,
        autoscaling=_autoscaling(arguments),
        nodes_per_group=arguments.nodes_per_group,
        cpus_per_group=arguments.cpus_per_group,
        num_gateways=arguments.num_gateways,
        host=arguments.host,
        grpc_port=arguments.grpc_port,
        http_port=arguments.http_port,
        group_host=arguments.group_host or _group_host(arguments),
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        api_keys_file=arguments.api_keys_file,
        allow_origins=tuple(arguments.allow_origin or ()),
        max_queue_wait_s=arguments.max_queue_wait_s,
        standing_wait_s=arguments.standing_wait_s,
        max_queued_requests=arguments.max_queued_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        silence_timeout_s=arguments.silence_timeout_s,
        step_deadline_s=arguments.step_deadline_s,
        max_group_deaths=arguments.max_group_deaths,
        drain_timeout_s=arguments.drain_timeout_s,
        handover_s=arguments.handover_s,
    )


def _group_host(arguments: argparse.Namespace) -> str:
    """On a cluster of several nodes a gateway need not be where its groups are."""
    return "auto" if arguments.ray_address else ClusterConfig.group_host


def _autoscaling(arguments: argparse.Namespace) -> AutoscalingSettings | None:
    names = ("min_groups", "max_groups", "target_ttft_s")
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if "max_groups" not in given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: --max-groups must say up to how many groups there may be")
    return AutoscalingSettings(**given)
