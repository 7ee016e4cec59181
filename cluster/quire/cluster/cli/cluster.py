"""The cluster flags of ``quire serve`` and ``quire demo``, and the `ClusterConfig` they make.

Defaults come from `ClusterConfig`.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import get_args

from quire.cluster.cli.engine import MODEL_HELP, add_engine_flags, engine_config
from quire.cluster.config import ClusterConfig
from quire.cluster.dialects.formats import TOOL_FORMATS
from quire.cluster.scaling.settings import AutoscalingSettings
from quire.router.config import RoutingConfig
from quire.router.policies.names import POLICY_NAMES
from quire.worker.api.config import BLOCK_SIZES, EngineConfig, SchedulingPolicy
from quire.worker.api.errors import ConfigError
from quire.worker.text.reasoning import REASONING_FORMATS


def add_cluster_flags(
    parser: argparse.ArgumentParser, *, num_groups: int, tensor_parallel_size: int
) -> None:
    """Adds them to a command, with its own defaults for these two."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        type=Path,
        help=MODEL_HELP,
    )
    add = parser.add_argument
    add(
        "--served-model-name",
        help="what clients call the model; ORG/NAME or the directory's name if absent",
    )
    add(
        "--name",
        help="the application's name, by which a Ray cluster tells several apart; made from the "
        "model's if absent",
    )
    add("--ray-address", help="a running Ray cluster ('auto' finds it); else one starts here")
    _add_group_flags(parser, num_groups=num_groups)
    _add_network_flags(parser)
    _add_routing_flags(parser)
    _add_admission_flags(parser)
    _add_failover_flags(parser)
    _add_engine_flags(parser, tensor_parallel_size=tensor_parallel_size)


def _add_group_flags(parser: argparse.ArgumentParser, *, num_groups: int) -> None:
    add = parser.add_argument_group(
        "replica groups and gateways", "Their number and placement."
    ).add_argument
    add("--num-groups", type=int, default=num_groups, help="replica groups, without autoscaling")
    add("--max-groups", type=int, help="most groups: start and stop them with the load")
    add("--min-groups", type=int, help="fewest groups; 0 stops the last one too; 1 if absent")
    add("--target-ttft-s", type=float, help="seconds that prompts may wait; 2 if absent")
    add(
        "--nodes-per-group",
        type=int,
        default=1,
        help="nodes that the ranks of a group are spread over",
    )
    add("--cpus-per-group", type=float, default=0.0, help="CPUs that Ray reserves; 0 counts none")
    add("--num-gateways", type=int, default=1, help="gateways")


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "network", "Where clients connect, with TLS and API keys."
    ).add_argument
    add("--host", default="127.0.0.1", help="where clients connect; 0.0.0.0 serves the network")
    add("--grpc-port", type=int, default=50051, help="0 takes any free one")
    add("--http-port", type=int, default=8000, help="0 takes any free one")
    add(
        "--metrics-port",
        type=int,
        default=0,
        help="each gateway's own /metrics and /health: the first free port from this on; 0 takes "
        "any free one, which its log names",
    )
    add(
        "--group-host",
        help="where groups listen for gateways; auto is the address of each one's node; if "
        "absent 127.0.0.1, with --ray-address auto",
    )
    add("--tls-certificate", type=Path, help="the gateways' certificate chain, PEM; with --tls-key")
    add("--tls-key", type=Path, help="its private key, PEM")
    add(
        "--api-keys-file",
        type=Path,
        help="one API key a line, followed by its tenant: clients must then show a key",
    )
    add(
        "--open-metrics",
        action="store_true",
        help="with --api-keys-file: /metrics of --metrics-port needs no operator's key; keep "
        "clients away from that port",
    )
    add(
        "--allow-origin",
        action="append",
        metavar="ORIGIN",
        help="browsers may call from pages of this origin, such as http://localhost:3000; '*' is "
        "any; can be given several times",
    )
    add(
        "--ignore-unknown-fields",
        action="store_true",
        help="ignore fields of HTTP bodies that are not known, rather than refuse the request",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template to use instead of the checkpoint's own",
    )
    add(
        "--tool-call-parser",
        metavar="NAME",
        default=ClusterConfig.tool_call_parser,
        help="format in which the model writes calls of tools: "
        + ", ".join(each.name for each in TOOL_FORMATS)
        + "; auto is the one that its response template says or its chat template shows, none "
        "leaves calls as text",
    )
    add(
        "--reasoning-parser",
        metavar="NAME",
        default=ClusterConfig.reasoning_parser,
        help="format in which it marks reasoning: "
        + ", ".join(each.name for each in REASONING_FORMATS)
        + ", auto or none",
    )
    add(
        "--max-connections",
        type=int,
        default=ClusterConfig.max_connections,
        help="client connections at a gateway, over HTTP and over gRPC each",
    )
    add(
        "--max-connections-per-address",
        type=int,
        default=ClusterConfig.max_connections_per_address,
        help="of these, from one address; no limit if absent, for clients behind a load balancer",
    )
    add(
        "--shut-out-s",
        type=float,
        default=ClusterConfig.shut_out_s,
        help="how long an address that floods the gRPC port gets no connection; 0 shuts out none",
    )
    add(
        "--head-timeout-s",
        type=float,
        default=ClusterConfig.head_timeout_s,
        help="limit from a connection's start, or a request's, to the end of its headers",
    )
    add(
        "--body-timeout-s",
        type=float,
        default=ClusterConfig.body_timeout_s,
        help="limit from there to the end of the request's body",
    )
    add(
        "--idle-timeout-s",
        type=float,
        default=ClusterConfig.idle_timeout_s,
        help="how long a connection without requests is kept",
    )


def _add_engine_flags(parser: argparse.ArgumentParser, *, tensor_parallel_size: int) -> None:
    """The flags of a group's engine, with those that only a serving engine has."""
    add = add_engine_flags(parser, tensor_parallel_size=tensor_parallel_size).add_argument
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
        help="order of a group's prompts: the first that came, or the one with the least "
        "left to compute",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--seed", type=int, default=0, help="seed of requests without their own")


def _add_routing_flags(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, what in POLICY_NAMES.items())
    add = parser.add_argument_group(
        "routing", f"How a group is chosen for a request. The policies are {listed}."
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
        help="follow the groups' cache events; without, route by load alone",
    )


def _add_admission_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "admission",
        "Requests wait for as long as their clients do. One beyond these bounds is refused at "
        "once, with a time to retry.",
    ).add_argument
    add(
        "--max-queue-wait-s",
        type=float,
        help="refuse a request whose predicted wait is longer, or longer than its own deadline, so "
        "that accepted requests keep their latency; if absent, none is refused for its wait",
    )
    add(
        "--max-queued-requests",
        type=int,
        default=ClusterConfig.max_queued_requests,
        help="most completions that wait at a gateway",
    )
    add(
        "--max-queued-bytes",
        type=int,
        default=ClusterConfig.max_queued_bytes,
        help="most memory of their prompts: six bytes for each token",
    )
    add(
        "--max-inflight",
        type=int,
        default=ClusterConfig.max_inflight,
        help="most completions under way at a gateway, those that wait among them",
    )


def _add_failover_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group(
        "failover and the stop",
        "Requests of a group that is lost, or about to stop, continue on another group.",
    ).add_argument
    add(
        "--silence-timeout-s",
        type=float,
        default=ClusterConfig.silence_timeout_s,
        help="a group that is silent for this long is lost",
    )
    add(
        "--step-deadline-s",
        type=float,
        default=ClusterConfig.step_deadline_s,
        help="a group that takes longer for a step is lost; set it well above the longest step",
    )
    add(
        "--group-wait-s",
        type=float,
        default=ClusterConfig.group_wait_s,
        help="how long requests and streams wait for a group, where all were lost and others start",
    )
    add(
        "--max-group-deaths",
        type=int,
        default=ClusterConfig.max_group_deaths,
        help="refuse a request after this many groups died under it",
    )
    add(
        "--drain-timeout-s",
        type=float,
        default=ClusterConfig.drain_timeout_s,
        help="time for running requests at the stop",
    )
    add(
        "--handover-s",
        type=float,
        default=ClusterConfig.handover_s,
        help="the last part of that, in which running requests move to other groups",
    )


def cluster_config(arguments: argparse.Namespace) -> ClusterConfig:
    """The configuration from the flags.

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
        metrics_port=arguments.metrics_port,
        ignore_unknown_fields=arguments.ignore_unknown_fields,
        chat_template=_chat_template(arguments.chat_template),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        max_connections=arguments.max_connections,
        max_connections_per_address=arguments.max_connections_per_address,
        shut_out_s=arguments.shut_out_s,
        head_timeout_s=arguments.head_timeout_s,
        body_timeout_s=arguments.body_timeout_s,
        idle_timeout_s=arguments.idle_timeout_s,
        group_host=arguments.group_host or _group_host(arguments),
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        api_keys_file=arguments.api_keys_file,
        open_metrics=arguments.open_metrics,
        allow_origins=tuple(arguments.allow_origin or ()),
        max_queue_wait_s=arguments.max_queue_wait_s,
        max_queued_requests=arguments.max_queued_requests,
        max_queued_bytes=arguments.max_queued_bytes,
        max_inflight=arguments.max_inflight,
        group_wait_s=arguments.group_wait_s,
        silence_timeout_s=arguments.silence_timeout_s,
        step_deadline_s=arguments.step_deadline_s,
        max_group_deaths=arguments.max_group_deaths,
        drain_timeout_s=arguments.drain_timeout_s,
        handover_s=arguments.handover_s,
    )


def _chat_template(given: str | None) -> str | None:
    """The text of a file, or a template that was written out."""
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {given}: cannot be read as text: {error}") from error


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
