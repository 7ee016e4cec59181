"""Settings of a deployment: the engine of each replica group, and the cluster around it.

    ClusterConfig           all of it, as a user writes it
      SharedSettings        what is not a model's
        GatewaySettings     what each gateway uses of that
        GroupSettings       what each group uses of that
      ModelConfig           one model
        GroupModel          what its groups use
    GroupConfig             what a process of a group gets: GroupSettings and GroupModel

The classes are unions of branches (`quire.worker.request.settings`), each of which stands beside
what it sets. A field's place decides which processes get it, and so whose restart a change needs.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire.cluster.dialects.formats import TOOL_FORMATS, check_parsers
from quire.cluster.features.autoscale.settings import AutoscalingSettings, GatewayAutoscaling
from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.tracing.tracing import check_endpoint
from quire.cluster.gateway.losses import FailoverSettings
from quire.cluster.serving.admission_config import AdmissionSettings
from quire.router.config import RoutingConfig
from quire.worker.model.hub import model_name
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.request.settings import Branch, part, setting
from quire.worker.text.reasoning import REASONING_FORMATS

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True, kw_only=True)
class ListenSettings(Branch):
    """Where and for whom gateways listen."""

    title = "network"
    about = "Addresses for clients, TLS and API keys."

    host: str = "127.0.0.1"
    """Address on which gateways listen; "0.0.0.0" accepts connections from the network."""
    grpc_port: int = 50051
    """Port for gRPC; 0 takes any free port."""
    http_port: int = 8000
    """Port for HTTP; 0 takes any free port."""
    metrics_port: int = 0
    """Each gateway serves its own ``/metrics`` and ``/health`` on the first free port from this one
    on, so that gateways of one node can be scraped separately; 0 takes any free port, which the
    gateway's log names."""
    api_keys_file: Path | None = None
    """A file of API keys, of which clients must send one: YAML with tenants, their limits and
    hashed keys (see "quire keys"), or one key per line. Such a key may be followed by a space and
    its tenant, or ``*`` for an operator's key, which sees the routing of all requests; a key
    without one is its own tenant. Tenants share no cached prefix. A changed file is read within
    seconds. If absent, no key is needed."""
    open_metrics: bool = False
    """With ``api_keys_file``: ``metrics_port`` answers without a key. Otherwise it needs an
    operator's key, as the clients' port always does."""
    allow_origins: tuple[str, ...] = setting((), flag="allow-origin", metavar="ORIGIN")
    """Origins whose web pages may call the HTTP API, such as "https://chat.example.com"; "*" allows
    any. If absent, pages of other origins cannot. The flag can be repeated."""
    ignore_unknown_fields: bool = False
    """Ignore unknown fields of HTTP bodies instead of refusing the request. Known fields
    that are not supported are still refused."""

    def _check(self) -> None:
        self._must(bool(self.host), "host", 'must be an address; "0.0.0.0" listens on all')
        for name in ("grpc_port", "http_port", "metrics_port"):
            is_port = 0 <= getattr(self, name) <= 65535
            self._must(is_port, name, "must be a port from 0 to 65535")
        if self.grpc_port == self.http_port != 0:
            raise ConfigError(
                f"grpc_port and http_port are both {self.grpc_port}: they must differ"
            )
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allow_origins={origin!r}: must be '*' or scheme://host[:port], with no path"
                )


@dataclass(frozen=True, kw_only=True)
class TlsSettings(Branch):
    """The certificate of gateways."""

    title = "network"

    tls_certificate: Path | None = None
    """The gateways' certificate chain, PEM, with its key in ``tls_key``. If absent, there is no
    TLS. New files at the same paths are loaded within a minute. Groups then use TLS too, each with
    a self-signed certificate."""
    tls_key: Path | None = None
    """The private key of ``tls_certificate``, PEM."""

    def _check(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("tls_certificate", "tls_key")
            if self.tls_certificate is None:
                given, missing = missing, given
            raise ConfigError(f"{given} is set and {missing} is not: set both or neither")


@dataclass(frozen=True, kw_only=True)
class ShutdownSettings(Branch):
    """When groups count as lost, and how processes stop."""

    title = "failover and shutdown"
    about = "Requests of a lost or stopping group continue on another group."

    silence_timeout_s: float = 2.0
    """A group that sends nothing for this long counts as lost even if its connection stands: it was
    stopped, or is cut off. A group sends at least eight frames in that time. If a gateway sends
    nothing for three times as long, its requests at the group are aborted."""
    step_deadline_s: float = 30.0
    """A group that takes longer for one step counts as lost. Keep it well above the longest
    healthy step, which prefills ``max_num_batched_tokens`` tokens or compiles a kernel for a
    new shape. The default is meant for slow CPUs; a tenth is enough for GPUs."""
    drain_timeout_s: float = 30.0
    """How long a stopping gateway or group lets its requests finish."""
    handover_s: float = 5.0
    """The last part of ``drain_timeout_s``, in which a stopping group's remaining requests are
    moved to other groups; if it equals ``drain_timeout_s``, they are moved at once. A move
    recomputes the prompt and the tokens so far if they are not cached."""

    def _check(self) -> None:
        self._must_be_finite("drain_timeout_s", "handover_s")
        self._must_be_finite("silence_timeout_s", "step_deadline_s", above_zero=True)


@dataclass(frozen=True, kw_only=True)
class LogSettings(Branch):
    """What each process logs and traces."""

    title = "logs"
    about = "`quire logs` shows them."

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that gateways and groups log."""
    log_format: Literal["text", "json"] = "text"
    """"json" writes each log line as a JSON object with the ids of its request and trace."""
    otlp_traces_endpoint: str | None = None
    """Where gateways and groups send traces of requests, over OTLP, such as
    "http://collector:4317". If absent, it is the value of ``OTEL_EXPORTER_OTLP_ENDPOINT``, if any.
    Needs quire-serve[otel]."""

    def _check(self) -> None:
        if self.otlp_traces_endpoint:
            check_endpoint(self.otlp_traces_endpoint)


@dataclass(frozen=True, kw_only=True)
class AccessLogSettings(Branch):
    """What gateways log of calls."""

    title = "logs"

    access_log: bool = True
    """Gateways log one line for each finished call, without its text."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(
    ListenSettings,
    ConnectionLimits,
    FailoverSettings,
    AccessLogSettings,
    TlsSettings,
    ShutdownSettings,
    LogSettings,
):
    """What each gateway uses of the settings that are not a model's."""

    gateway_resource: str | None = setting(None, flag=None)
    """A custom Ray resource, of which each gateway takes one. It selects the nodes of gateways."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings(TlsSettings, ShutdownSettings, LogSettings):
    """What each group uses of the settings that are not a model's."""

    title = "network"

    group_host: str = "127.0.0.1"
    """Address on which groups listen for gateways; every gateway's node must reach it. "auto" is
    that of the group's own Ray node, and the default with --ray-address."""

    def _check(self) -> None:
        self._must(bool(self.group_host), "group_host", 'must be an address, or "auto"')


@dataclass(frozen=True, kw_only=True)
class NumGateways(Branch):
    """How many gateways Ray Serve runs, which a gateway does not use."""

    title = "gateways"

    num_gateways: int = 1
    """Gateways. Several on one node share the ports below through SO_REUSEPORT. Not used if
    ``gateway_autoscaling`` is set, which starts with ``min_gateways``."""
    gateway_autoscaling: GatewayAutoscaling | None = None
    """Starts and stops gateways with the requests in progress. If absent, there are always
    ``num_gateways``."""

    def _check(self) -> None:
        self._must_be_at_least(1, "num_gateways")


@dataclass(frozen=True, kw_only=True)
class UpgradeSettings(Branch):
    """How Ray Serve replaces gateways and groups, which these do not use."""

    start_first: bool = False
    """An upgrade starts each new group and gateway before it stops an old one. It needs room for
    one more of each, and waits if there is none. Otherwise a single group's clients wait."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings(NumGateways, GatewaySettings, GroupSettings, UpgradeSettings):
    """The settings that are not a model's."""

    def serving(self, *models: "ModelConfig") -> "ClusterConfig":
        """The cluster with these models, of which there is at least one."""
        first, *more = models
        of_first = vars(part(ModelConfig, first))
        return part(ClusterConfig, part(SharedSettings, self), more_models=tuple(more), **of_first)


@dataclass(frozen=True, kw_only=True)
class LoraModule:
    """A LoRA adapter that is served from the start."""

    name: str
    """What clients call it."""
    path: str
    """A directory that each gateway's node has, or ``ORG/NAME[@REVISION]`` of the hub."""


@dataclass(frozen=True, kw_only=True)
class GroupModel(Branch):
    """What the groups of a model use of its settings."""

    title = "replica groups"

    engine: EngineConfig
    """Engine settings of every replica group."""
    served_model_name: str | None = setting(None, flag=None)
    """Name of the model for clients. If absent, the name of its directory, or ``ORG/NAME``."""
    nodes_per_group: int = 1
    """Nodes that each group spans, with equally many ranks on each. With 1, a group's ranks are
    child processes of its replica, which is fastest; with more, they are Ray actors that exchange
    sums over the network. All nodes need the model at the same path, or fetch it from the hub."""
    cpus_per_group: float = 0
    """CPUs that Ray reserves for a group, in equal parts on each of its nodes; 0 reserves
    none. On GPUs, one GPU per rank is always reserved."""
    group_resource: str | None = setting(None, flag=None)
    """A custom Ray resource, of which each group takes one on each of its nodes. It selects the
    nodes of groups."""

    def _check(self) -> None:
        num_ranks, engine = self.engine.tensor_parallel_size, self.engine
        self._must(
            self.nodes_per_group >= 1 and not num_ranks % self.nodes_per_group,
            "nodes_per_group",
            f"must divide engine.tensor_parallel_size={num_ranks}",
        )
        self._must_be_finite("cpus_per_group")
        is_on_one = self.nodes_per_group == 1
        self._must(
            is_on_one or not engine.enable_lora,
            "nodes_per_group",
            "must be 1 with engine.enable_lora, since each rank reads adapters from its own node",
        )
        self._must(
            is_on_one or not engine.kv_transfer,
            "nodes_per_group",
            "must be 1 with engine.kv_transfer, since the ranks of a group share the memory that "
            "blocks travel through",
        )
        if engine.kv_transfer and not engine.enable_prefix_caching:
            raise ConfigError(
                "engine.kv_transfer: needs engine.enable_prefix_caching, since only cached blocks "
                "are lent"
            )

    @property
    def transfers_kv(self) -> bool:
        """Whether groups take blocks from each other, where the model has any."""
        return bool(self.engine.kv_transfer)

    @property
    def model_name(self) -> str:
        return self.served_model_name or model_name(self.engine.model)


@dataclass(frozen=True, kw_only=True)
class GroupConfig(GroupSettings, GroupModel):
    """All settings that a process of a replica group uses."""


@dataclass(frozen=True, kw_only=True)
class NumGroups(Branch):
    """How many groups Ray Serve runs, which a group does not use."""

    title = "replica groups"
    about = "Their number and placement."

    num_groups: int = 1
    """Replica groups, each with ``tensor_parallel_size`` ranks. Not used if ``autoscaling`` is
    set, which starts with ``min_groups``."""
    autoscaling: AutoscalingSettings | None = None
    """Starts and stops groups with the load. If absent, there are always ``num_groups``."""

    def _check(self) -> None:
        self._must_be_at_least(1, "num_groups")

    @property
    def min_groups(self) -> int:
        """Groups that there always are."""
        return self.num_groups if self.autoscaling is None else self.autoscaling.min_groups

    @property
    def max_groups(self) -> int:
        return self.num_groups if self.autoscaling is None else self.autoscaling.max_groups


@dataclass(frozen=True, kw_only=True)
class FormatSettings(Branch):
    """How gateways write a model's prompts and read its answers."""

    title = "format"
    about = "How the model's prompts and answers are written."

    chat_template: str | None = None
    """A Jinja template to use instead of the checkpoint's own, as text; the flag also takes the
    name of a file."""
    tool_call_parser: str = setting("auto", listed=[each.name for each in TOOL_FORMATS])
    """The format in which the model writes tool calls; "auto" derives it from the model's response
    template or chat template, "none" leaves calls as text."""
    reasoning_parser: str = setting("auto", listed=[each.name for each in REASONING_FORMATS])
    """The format in which the model marks reasoning, likewise."""

    def _check(self) -> None:
        check_parsers(self.tool_call_parser, self.reasoning_parser)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(NumGroups, FormatSettings, AdmissionSettings, GroupModel):
    """The settings of one served model: its groups, and how gateways take its requests.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    aliases: tuple[str, ...] = setting((), flag=None)
    """Further names of the model for clients; answers have ``served_model_name``."""
    lora_modules: tuple[LoraModule, ...] = setting((), flag=None)
    """Adapters of the model, with ``enable_lora``. More can be loaded while it is served."""
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    """Routing settings of every gateway."""

    def _check(self) -> None:
        if self.lora_modules and not self.engine.enable_lora:
            raise ConfigError(
                f"lora_modules has {self.lora_modules[0].name!r}: set engine.enable_lora "
                "(--enable-lora) too"
            )

    @property
    def transfers_kv(self) -> bool:
        """Whether groups take blocks from each other, where the model has any."""
        if self.engine.kv_transfer is None:
            may = self.nodes_per_group == 1 and self.engine.enable_prefix_caching
            return may and self.max_groups > 1
        return self.engine.kv_transfer

    @property
    def modules(self) -> dict[str, str]:
        """The paths of ``lora_modules``, by name."""
        return {each.name: each.path for each in self.lora_modules}


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(SharedSettings, ModelConfig, GroupConfig):
    """The settings of a served model, or the first of several, and of the cluster around it.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    more_models: tuple[ModelConfig, ...] = setting((), flag=None)
    """Further models that the same gateways serve, each with its own groups."""

    def _check(self) -> None:
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

    @property
    def models(self) -> "dict[str, ClusterConfig]":
        """By the clients' name of each model, the configuration as if it were the only one."""
        alone = map(self.serving, self.each_model)
        return {config.model_name: config for config in alone}

    @property
    def each_model(self) -> tuple[ModelConfig, ...]:
        """The settings of each model, without the cluster's."""
        return part(ModelConfig, self), *self.more_models
