"""Settings of a deployment: the engine of each replica group, and the cluster around it."""

import re
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from quire.cluster.dialects.formats import check_parsers
from quire.cluster.failover.resume import CompletionConfig
from quire.cluster.features.autoscale.settings import AutoscalingSettings, GatewayAutoscaling
from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.tracing.tracing import check_endpoint
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.router.config import RoutingConfig
from quire.worker.model.hub import model_name
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class LoraModule:
    """A LoRA adapter that is served from the start."""

    name: str
    """What clients call it."""
    path: str
    """A directory that each gateway's node has, or ``ORG/NAME[@REVISION]`` of the hub."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The settings of one served model: its groups, and how gateways take its requests.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    engine: EngineConfig
    """Engine settings of every replica group."""
    served_model_name: str | None = None
    """Name of the model for clients; ``None`` is the name of its directory, or ``ORG/NAME``."""
    aliases: tuple[str, ...] = ()
    """Further names of the model for clients; answers have ``served_model_name``."""
    lora_modules: tuple[LoraModule, ...] = ()
    """Adapters of the model, with ``engine.enable_lora``. More can be loaded while it is
    served."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Routing settings of every gateway."""
    num_groups: int = 1
    """Replica groups, each with ``engine.tensor_parallel_size`` ranks. Not used if
    ``autoscaling`` is set, which starts with ``min_groups``."""
    autoscaling: AutoscalingSettings | None = None
    """Starts and stops groups with the load; ``None`` keeps ``num_groups``."""
    nodes_per_group: int = 1
    """Nodes that each group spans, with equally many ranks on each. With 1, a group's ranks are
    child processes of its replica, which is fastest; with more, they are Ray actors that exchange
    sums over the network. All nodes need the model at the same path, or fetch it from the hub."""
    cpus_per_group: float = 0
    """CPUs that Ray reserves for a group, in equal parts on each of its nodes; 0 reserves
    none. On GPUs, one GPU per rank is always reserved."""
    group_resource: str | None = None
    """A custom Ray resource, of which each group takes one on each of its nodes. It selects the
    nodes of groups."""
    chat_template: str | None = None
    """A Jinja template to use instead of the checkpoint's own, as text."""
    tool_call_parser: str = "auto"
    """The format in which the model writes tool calls; "auto" derives it from the model's response
    template or chat template, "none" leaves calls as text."""
    reasoning_parser: str = "auto"
    """The format in which the model marks reasoning, likewise."""
    max_queue_wait_s: float | None = None
    """A request is refused at once if its predicted wait exceeds this, or its own deadline.
    ``None`` lets requests wait for as long as their clients do."""
    max_queued_requests: int = AdmissionConfig.max_queued_requests
    """Completions that may wait at a gateway."""
    max_queued_bytes: int = AdmissionConfig.max_queued_bytes
    """Memory for the prompts of waiting completions: six bytes for each token."""
    max_inflight: int = AdmissionConfig.max_inflight
    """Completions in progress at a gateway, including waiting ones."""

    def __post_init__(self) -> None:
        if self.num_groups < 1:
            raise ConfigError(f"num_groups={self.num_groups!r}: must be 1 or more")
        num_ranks = self.engine.tensor_parallel_size
        if self.nodes_per_group < 1 or num_ranks % self.nodes_per_group:
            raise ConfigError(
                f"nodes_per_group={self.nodes_per_group}: must divide "
                f"engine.tensor_parallel_size={num_ranks}"
            )
        if not 0 <= self.cpus_per_group < inf:
            raise ConfigError(
                f"cpus_per_group={self.cpus_per_group!r}: must be 0 or more, and finite"
            )
        if self.lora_modules and not self.engine.enable_lora:
            raise ConfigError(
                f"lora_modules has {self.lora_modules[0].name!r}: set engine.enable_lora "
                "(--enable-lora) too"
            )
        if self.engine.enable_lora and self.nodes_per_group > 1:
            raise ConfigError(
                f"nodes_per_group={self.nodes_per_group}: must be 1 with engine.enable_lora, since "
                "each rank reads adapters from its own node"
            )
        if self.engine.kv_transfer and self.nodes_per_group > 1:
            raise ConfigError(
                f"nodes_per_group={self.nodes_per_group}: must be 1 with engine.kv_transfer, since "
                "the ranks of a group share the memory that blocks travel through"
            )
        if self.engine.kv_transfer and not self.engine.enable_prefix_caching:
            raise ConfigError(
                "engine.kv_transfer: needs engine.enable_prefix_caching, since only cached blocks "
                "are lent"
            )
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        self.admission()  # Checks its own part.

    @property
    def min_groups(self) -> int:
        """Groups that there always are."""
        return self.num_groups if self.autoscaling is None else self.autoscaling.min_groups

    @property
    def max_groups(self) -> int:
        return self.num_groups if self.autoscaling is None else self.autoscaling.max_groups

    @property
    def transfers_kv(self) -> bool:
        """Whether groups take blocks from each other, where the model has any."""
        if self.engine.kv_transfer is None:
            may = self.nodes_per_group == 1 and self.engine.enable_prefix_caching
            return may and self.max_groups > 1
        return self.engine.kv_transfer

    def admission(self) -> AdmissionConfig:
        """At each gateway."""
        return AdmissionConfig(
            max_queue_wait_s=inf if self.max_queue_wait_s is None else self.max_queue_wait_s,
            max_queued_requests=self.max_queued_requests,
            max_queued_bytes=self.max_queued_bytes,
            max_inflight=self.max_inflight,
        )

    @property
    def modules(self) -> dict[str, str]:
        """The paths of ``lora_modules``, by name."""
        return {each.name: each.path for each in self.lora_modules}

    @property
    def model_name(self) -> str:
        return self.served_model_name or model_name(self.engine.model)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ModelConfig):
    """The settings of a served model, or the first of several, and of the cluster around it.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    more_models: tuple[ModelConfig, ...] = ()
    """Further models that the same gateways serve, each with its own groups."""
    num_gateways: int = 1
    """Gateways. Several on one node share the ports below through SO_REUSEPORT. Not used if
    ``gateway_autoscaling`` is set, which starts with ``min_gateways``."""
    gateway_autoscaling: GatewayAutoscaling | None = None
    """Starts and stops gateways with the requests in progress; ``None`` keeps ``num_gateways``."""
    gateway_resource: str | None = None
    """A custom Ray resource, of which each gateway takes one. It selects the nodes of gateways."""
    host: str = "127.0.0.1"
    """Address on which gateways listen; "0.0.0.0" accepts connections from the network."""
    grpc_port: int = 50051
    """Port for gRPC; 0 takes any free port."""
    http_port: int = 8000
    """Port for HTTP; 0 takes any free port."""
    metrics_port: int = 0
    """Each gateway serves its own ``/metrics`` and ``/health`` on the first free port from this one
    on, so that gateways of one node can be scraped separately; 0 takes any free port."""
    max_connections: int = ConnectionLimits.max_connections
    """Client connections that a gateway keeps open, over HTTP and over gRPC each; fewer if a
    process may not have four times as many files open. HTTP connections without a request, and gRPC
    connections without an admitted call, are closed to make room for new ones."""
    max_connections_per_address: int | None = None
    """Connections from one address. ``None`` sets no limit: behind a load balancer, all clients
    may have its address."""
    shut_out_s: float = ConnectionLimits.shut_out_s
    """How long an address that floods the gRPC port repeatedly is blocked; 0 only closes the
    connections that flood."""
    head_timeout_s: float = ConnectionLimits.head_timeout_s
    """Limit from the start of a connection to the end of its first request's headers, and from the
    first byte of each further request to the end of its headers; over gRPC, to the end of the
    handshake."""
    body_timeout_s: float = ConnectionLimits.body_timeout_s
    """Limit from the end of the headers to that of the body; over gRPC, of the call's message."""
    idle_timeout_s: float = ConnectionLimits.idle_timeout_s
    """How long a connection without requests is kept."""
    group_host: str = "127.0.0.1"
    """Address on which groups listen for gateways; every gateway's node must reach it. "auto" is
    that of the group's own Ray node."""
    tls_certificate: Path | None = None
    """The gateways' certificate chain, PEM, with its key below; ``None`` serves without TLS. New
    files at the same paths are loaded within a minute. Groups then use TLS too, each with a
    self-signed certificate."""
    tls_key: Path | None = None
    """The private key of ``tls_certificate``, PEM."""
    api_keys_file: Path | None = None
    """A file of API keys, of which clients must send one: YAML with tenants, their limits and
    hashed keys, or one key per line. Such a key may be followed by a space and its tenant, or ``*``
    for an operator's key, which sees the routing of all requests; a key without one is its own
    tenant. Tenants share no cached prefix. A changed file is read within seconds. ``None`` needs no
    key."""
    open_metrics: bool = False
    """With ``api_keys_file``: ``metrics_port`` answers without a key. Otherwise it needs an
    operator's key, as the clients' port always does."""
    allow_origins: tuple[str, ...] = ()
    """Origins whose web pages may call the HTTP API, such as "https://chat.example.com"; "*" allows
    any. If empty, pages of other origins cannot."""
    ignore_unknown_fields: bool = False
    """Ignore unknown fields of HTTP bodies instead of refusing the request. Known fields
    that are not supported are still refused."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that gateways and groups log."""
    log_format: Literal["text", "json"] = "text"
    """"json" writes each log line as a JSON object with the ids of its request and trace."""
    access_log: bool = True
    """Gateways log one line for each finished call, without its text."""
    otlp_traces_endpoint: str | None = None
    """Where gateways and groups send traces of requests, over OTLP, such as
    "http://collector:4317". ``None`` is the value of ``OTEL_EXPORTER_OTLP_ENDPOINT``, if any. Needs
    the extra ``otel``."""
    group_wait_s: float = CompletionConfig.group_wait_s
    """How long requests and streams wait for a new group after all groups were lost. Set it longer
    than a group takes to start. If autoscaling may stop the last group,
    ``autoscaling.start_wait_s`` is used instead."""
    drain_timeout_s: float = 30.0
    """How long a stopping gateway or group lets its requests finish."""
    handover_s: float = 5.0
    """The last part of ``drain_timeout_s``, in which a stopping group's remaining requests are
    moved to other groups; if it equals ``drain_timeout_s``, they are moved at once. A move
    recomputes the prompt and the tokens so far if they are not cached."""
    silence_timeout_s: float = 2.0
    """A group that sends nothing for this long counts as lost even if its connection stands: it was
    stopped, or is cut off. A group sends at least eight frames in that time. If a gateway sends
    nothing for three times as long, its requests at the group are aborted."""
    step_deadline_s: float = 30.0
    """A group that takes longer for one step counts as lost. Keep it well above the longest
    healthy step, which prefills ``engine.max_num_batched_tokens`` tokens or compiles a kernel for a
    new shape. The default is meant for slow CPUs; a tenth is enough for GPUs."""
    max_group_deaths: int = 3
    """A request is refused after this many groups in a row died while they ran it."""
    start_first: bool = False
    """An upgrade starts each new group and gateway before it stops an old one. It needs room for
    one more of each, and waits if there is none. Otherwise a single group's clients wait."""

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.num_gateways < 1:
            raise ConfigError(f"num_gateways={self.num_gateways!r}: must be 1 or more")
        models = (self, *self.more_models)
        names = Counter(name for each in models for name in (each.model_name, *each.aliases))
        if twice := [name for name, number in names.items() if number > 1]:
            raise ConfigError(
                f"more_models: two models are called {twice[0]!r}; give one of them another "
                "served_model_name"
            )
        names.update(module.name for each in models for module in each.lora_modules)
        if twice := [name for name, number in names.items() if number > 1]:
            raise ConfigError(
                f"lora_modules: {twice[0]!r} is the name of another adapter or of a model; take "
                "another"
            )
        for name in ("grpc_port", "http_port", "metrics_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value!r}: must be a port from 0 to 65535")
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("tls_certificate", "tls_key")
            if self.tls_certificate is None:
                given, missing = missing, given
            raise ConfigError(f"{given} is set and {missing} is not: set both or neither")
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allow_origins={origin!r}: must be '*' or scheme://host[:port], with no path"
                )
        self.connections()  # Checks its own part.
        if self.otlp_traces_endpoint:
            check_endpoint(self.otlp_traces_endpoint)
        if self.grpc_port == self.http_port != 0:
            raise ConfigError(
                f"grpc_port and http_port are both {self.grpc_port}: they must differ"
            )
        for name in ("drain_timeout_s", "handover_s", "group_wait_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more, and finite")
        for name in ("silence_timeout_s", "step_deadline_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0, and finite")
        if self.max_group_deaths < 2:
            raise ConfigError(
                f"max_group_deaths={self.max_group_deaths!r}: must be 2 or more, since 1 would "
                "refuse every request whose group dies"
            )

    @property
    def models(self) -> "dict[str, ClusterConfig]":
        """By the clients' name of each model, the configuration as if it were the only one."""
        alone = map(self.serving, self.each_model)
        return {config.model_name: config for config in alone}

    @property
    def each_model(self) -> tuple[ModelConfig, ...]:
        """The settings of each model, without the cluster's."""
        first = ModelConfig(**_model_settings(self))
        return first, *self.more_models

    def serving(self, *models: ModelConfig) -> "ClusterConfig":
        """The same cluster with these models, of which there is at least one."""
        first, *more = models
        return replace(self, **_model_settings(first), more_models=tuple(more))

    def connections(self) -> ConnectionLimits:
        """Limits on client connections, for each gateway."""
        return ConnectionLimits(
            max_connections=self.max_connections,
            max_connections_per_address=self.max_connections_per_address,
            shut_out_s=self.shut_out_s,
            head_timeout_s=self.head_timeout_s,
            body_timeout_s=self.body_timeout_s,
            idle_timeout_s=self.idle_timeout_s,
        )


def _model_settings(config: ModelConfig) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(ModelConfig)}
