"""The cluster flags of ``quire serve`` and ``quire demo``, and their conversion to a
`ClusterConfig`.

Defaults come from `ClusterConfig`.
"""

import argparse
from pathlib import Path
from typing import Any

from quire.cluster.cli.engine import MODEL_HELP, add_engine_flags, engine_config
from quire.cluster.cli.fields import add_fields, chat_template, given_fields
from quire.cluster.cli.help import finite
from quire.cluster.cli.lora import lora_modules
from quire.cluster.config import ClusterConfig, LoraModule, ModelConfig
from quire.cluster.deploy.kept_keys import kept_keys_file
from quire.cluster.dialects.formats import TOOL_FORMATS
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.router.config import POLICY_NAMES, RoutingConfig
from quire.worker.request.config import BLOCK_SIZES, EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.text.reasoning import REASONING_FORMATS

_GROUPS = {
    "num_groups": "replica groups, without autoscaling",
    "nodes_per_group": "nodes that each group spans, with equally many ranks on each",
    "cpus_per_group": "CPUs that Ray reserves for each group; 0 reserves none",
}
_AUTOSCALING = (
    ("max_groups", int, "enables autoscaling, up to this many groups"),
    ("min_groups", int, "with --max-groups: fewest groups; 0 stops the last one too; 1 if absent"),
    (
        "target_ttft_s",
        float,
        "with --max-groups: seconds that prompts may wait; 2 if absent",
    ),
)
_NETWORK = {
    "host": "address for clients; 0.0.0.0 accepts connections from the network",
    "grpc_port": "port for gRPC; 0 takes any free one",
    "http_port": "port for HTTP; 0 takes any free one",
    "metrics_port": "port for each gateway's own /metrics and /health: the first free one from "
    "this number on; 0 takes any free one, which the gateway's log names",
    "group_host": "address on which groups listen for gateways; auto is that of each group's "
    "node; if absent 127.0.0.1, or auto with --ray-address",
    "tls_certificate": "the gateways' certificate chain, PEM; with --tls-key",
    "tls_key": "the private key of --tls-certificate, PEM",
    "api_keys_file": "tenants and hashed API keys (see 'quire keys'), or one key per line, "
    "followed by its tenant; clients must then send a key",
    "open_metrics": "with --api-keys-file: /metrics of --metrics-port needs no operator's key; "
    "keep clients away from that port",
    "ignore_unknown_fields": "ignore unknown fields of HTTP bodies instead of refusing the request",
    "max_connections": "client connections at a gateway, over HTTP and over gRPC each",
    "max_connections_per_address": "limit of --max-connections for one address; no limit if "
    "absent, because all clients behind a load balancer have its address",
    "shut_out_s": "how long an address that floods the gRPC port is blocked; 0 blocks none",
    "head_timeout_s": "limit from the start of a connection or request to the end of its headers",
    "body_timeout_s": "limit from the end of the headers to the end of the request's body",
    "idle_timeout_s": "how long a connection without requests is kept",
}
_FORMAT = {
    "chat_template": "a file with a Jinja template to use instead of the checkpoint's own",
    "tool_call_parser": "format in which the model writes tool calls: "
    + ", ".join(each.name for each in TOOL_FORMATS)
    + "; auto derives it from the model's response template or chat template, none leaves calls as "
    "text",
    "reasoning_parser": "format in which the model marks reasoning: "
    + ", ".join(each.name for each in REASONING_FORMATS)
    + ", auto or none",
}
_ADMISSION = {
    "max_queue_wait_s": "refuse a request whose predicted wait is longer, or longer than its own "
    "deadline, so that accepted requests keep their latency; if absent, none is refused for its "
    "wait",
    "max_queued_requests": "most completions that wait at one gateway",
    "max_queued_bytes": "most memory for prompts of waiting completions: six bytes a token",
    "max_inflight": "most completions in progress at one gateway, including waiting ones",
}
_LOGS = {
    "log_level": "the lowest level that gateways and groups log",
    "log_format": "json: each log line is a JSON object",
    "access_log": "log one line for each finished call, without its text",
    "otlp_traces_endpoint": "where to send traces of requests, over OTLP; needs quire-serve[otel]",
}
_FAILOVER = {
    "silence_timeout_s": "a group that sends nothing for this long counts as lost",
    "step_deadline_s": "a group that takes longer for a step counts as lost; set it well above the "
    "longest step",
    "group_wait_s": "how long requests and streams wait for a new group after all groups were lost",
    "max_group_deaths": "refuse a request after this many groups died under it",
    "drain_timeout_s": "how long running requests may continue after a stop was requested",
    "handover_s": "last part of --drain-timeout-s, in which running requests move to other groups",
}
_ENGINE = {
    "gpu_memory_utilization": "share of GPU memory to use, or of free RAM for the KV cache",
    "kv_cache_memory_bytes": "size of each group's KV cache, instead of a share of memory",
    "max_model_len": "most tokens of prompt and output together; the model's own limit if absent",
    "enable_prefix_caching": "reuse the KV of common prefixes",
    "kv_offloading_size": "GiB of host memory per group for blocks that its KV cache evicts",
    "kv_disk_dir": "a folder on each node's local disk for blocks beyond that, also across "
    "restarts",
    "kv_disk_size": "most GiB that each group uses in --kv-disk-dir",
    "kv_transfer": "fetch KV blocks from other groups; if absent, on if there may be several "
    "groups and each is on one node",
    "kv_events": "remember the tokens of cached blocks, for routers that call SubscribeKvEvents",
    "scheduling_policy": "order of a group's prompts: by arrival, or least remaining work first",
    "enforce_eager": "no CUDA graphs",
    "seed": "seed for requests without one",
}
"""Help texts of the engine flags, by the field that they set."""


def add_cluster_flags(
    parser: argparse.ArgumentParser,
    *,
    num_groups: int,
    tensor_parallel_size: int,
    ray_address_help: str = "a running Ray cluster ('auto' finds it); if absent, one is started",
) -> None:
    """Adds the cluster flags to a command, with the command's defaults for these two."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="*",
        type=Path,
        help=f"{MODEL_HELP}; several models are served at the same address, each by its own groups "
        "and all with the settings given here",
    )
    add = parser.add_argument
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model for clients; ORG/NAME or the directory's name if absent. Repeat it "
        "for further names of one model, or to name several models in their order",
    )
    add(
        "--name",
        help="name of the application, unique on its Ray cluster; derived from the model's if "
        "absent",
    )
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings of the cluster and of each model, in YAML; flags override them",
    )
    add("--ray-address", help=ray_address_help)
    group = parser.add_argument_group("gateways")
    add_fields(group, ClusterConfig, {"num_gateways": "gateways"})
    _add_network_flags(parser)
    group = parser.add_argument_group(
        "failover and shutdown",
        "Requests of a lost or stopping group continue on another group.",
    )
    add_fields(group, ClusterConfig, _FAILOVER)
    group = parser.add_argument_group("logs", "`quire logs` shows them.")
    add_fields(group, ClusterConfig, _LOGS)
    add_model_flags(parser, num_groups=num_groups, tensor_parallel_size=tensor_parallel_size)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags of ``quire serve``."""
    add_cluster_flags(parser, num_groups=1, tensor_parallel_size=1)
    parser.add_argument(
        "--status-interval-s",
        type=finite,
        metavar="S",
        help="how often to print the load; 0 never. If absent, every 2 s in one line of a "
        "terminal, elsewhere every 10 s in which something ran",
    )
    parser.add_argument(
        "--print-config",
        nargs="?",
        const="given",
        choices=("given", "all"),
        metavar="all",
        help="print the settings as a file for --config, each with its source, and exit; "
        "--print-config=all includes the defaults",
    )


def add_model_flags(
    parser: argparse.ArgumentParser, *, num_groups: int, tensor_parallel_size: int
) -> None:
    """Adds the flags of a single model, with the command's defaults for these two."""
    group = parser.add_argument_group("replica groups", "Their number and placement.")
    add_fields(group, ModelConfig, _GROUPS, num_groups=num_groups)
    for name, type_, what in _AUTOSCALING:
        group.add_argument(f"--{name.replace('_', '-')}", type=type_, help=what)
    group = parser.add_argument_group("format", "How the model's prompts and answers are written.")
    add_fields(group, ModelConfig, _FORMAT)
    _add_routing_flags(parser)
    group = parser.add_argument_group(
        "admission",
        "Requests wait as long as their clients do. Requests beyond these limits are refused at "
        "once, with a retry time.",
    )
    add_fields(group, ModelConfig, _ADMISSION)
    group = add_engine_flags(parser, tensor_parallel_size=tensor_parallel_size)
    group.add_argument(
        "--block-size", type=int, choices=BLOCK_SIZES, default=16, help="tokens in a KV block"
    )
    add_fields(group, EngineConfig, _ENGINE)
    group.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help="with --enable-lora: adapters to serve from the start, which clients name as their "
        'model; NAME=PATH@MODEL or {"name": …, "path": …, "base_model_name": …} is for one of '
        "several models; PATH is a directory or ORG/NAME of the Hugging Face hub",
    )


def _add_network_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network", "Addresses for clients, TLS and API keys.")
    add_fields(group, ClusterConfig, _NETWORK, group_host=None)
    group.add_argument(
        "--api-key",
        dest="api_keys",
        nargs="+",
        metavar="KEY",
        help="API keys, of which clients must send one, instead of a file; other users of this "
        "machine can see them in its list of processes",
    )
    group.add_argument(
        "--allow-origin",
        dest="allow_origins",
        action="append",
        metavar="ORIGIN",
        help="allow calls from web pages of this origin, such as http://localhost:3000; '*' "
        "allows any; can be repeated",
    )


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
        "--prefill-groups",
        type=int,
        default=0,
        metavar="N",
        help="groups that only compute prompts and hand each stream over, with its KV, to the "
        "others; 0: each does both",
    )
    add(
        "--directory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="follow the groups' cache events; without, route by load alone",
    )


def cluster_config(arguments: argparse.Namespace) -> ClusterConfig:
    """The cluster's configuration from the flags.

    Raises:
        ConfigError: The flags cannot work; the message names the flag and the reason.
    """
    if arguments.config is not None:
        from quire.cluster.cli.config_file import config_from_file, read_file

        file = read_file(arguments.config)
        file.fill(arguments)
        names = _names(arguments) if arguments.model else []
        return config_from_file(
            arguments, file, names, group_host=_group_host(arguments), over=_keys(arguments)
        )
    models = arguments.model or [None]
    settings: list[dict[str, Any]] = [
        {
            "engine": engine_config(arguments, model),
            "served_model_name": name,
            "aliases": tuple(aliases),
        }
        for model, (name, *aliases) in zip(models, _names(arguments), strict=True)
    ]
    called = [ModelConfig(**each).model_name for each in settings]
    modules = lora_modules(arguments.lora_modules or (), models=called)
    first, *others = (
        each | {"lora_modules": modules[name]} for each, name in zip(settings, called, strict=True)
    )
    shared = _shared_settings(arguments)
    more_models = tuple(ModelConfig(**shared | each) for each in others)
    given = given_fields(ClusterConfig, arguments) | _keys(arguments)
    given |= {
        "allow_origins": tuple(arguments.allow_origins or ()),
        "group_host": arguments.group_host or _group_host(arguments),
    }
    return ClusterConfig(**given | shared | first, more_models=more_models)


def _keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """The setting for the keys of ``--api-key``. Raises ConfigError if gateways could not find
    them."""
    if not arguments.api_keys:
        return {}
    if arguments.api_keys_file or arguments.ray_address:
        raise ConfigError(
            "--api-key: put the keys into a file that each gateway's node has, and name it with "
            "--api-keys-file"
        )
    return {"api_keys_file": kept_keys_file(arguments.api_keys)}


def model_config(arguments: argparse.Namespace) -> ModelConfig:
    """The configuration of one model, ``path``, from the flags of `add_model_flags`. Raises
    ConfigError."""
    name, *aliases = arguments.served_model_name or [None]
    return ModelConfig(
        **_shared_settings(arguments)
        | {
            "engine": engine_config(arguments, arguments.path),
            "served_model_name": name,
            "aliases": tuple(aliases),
            "lora_modules": _modules_of_one(arguments),
        }
    )


def _modules_of_one(arguments: argparse.Namespace) -> tuple[LoraModule, ...]:
    (modules,) = lora_modules(arguments.lora_modules or (), models=[""]).values()
    return modules


def _shared_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that apply to every model."""
    return given_fields(ModelConfig, arguments) | {
        "routing": RoutingConfig(
            policy=arguments.routing_policy,
            use_directory=arguments.directory,
            num_prefill_groups=arguments.prefill_groups,
        ),
        "autoscaling": _autoscaling(arguments),
        "chat_template": chat_template(arguments.chat_template),
    }


def _names(arguments: argparse.Namespace) -> list[list[str | None]]:
    """For each model, its name for clients and its aliases; ``None`` stands for the model's own
    name. Raises ConfigError if several models have only some names."""
    given: list[str] = arguments.served_model_name or []
    num_models = len(arguments.model)
    if num_models > 1:
        if given and len(given) != num_models:
            raise ConfigError(
                f"--served-model-name is given {len(given)} times for {num_models} models: give "
                "one for each, in their order, or none"
            )
        return [[given[place] if given else None] for place in range(num_models)]
    if num_models or given:
        return [[*given]] if given else [[None]]
    from quire import demo_model

    return [[demo_model.NAME]]


def _group_host(arguments: argparse.Namespace) -> str:
    """Where groups bind. With several nodes, gateways may run on other nodes than their groups."""
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
