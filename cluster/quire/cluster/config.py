"""What a deployment can be told: the engine of each replica group, and the cluster around it."""

from dataclasses import dataclass
from pathlib import Path

from quire.cluster.admission import AdmissionConfig
from quire.worker.config import EngineConfig
from quire.worker.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The settings of one served model.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    engine: EngineConfig
    """Of every replica group."""
    served_model_name: str | None = None
    """What clients call the model; ``None`` is the name of its directory."""
    num_groups: int = 1
    """Replica groups, each with ``engine.tensor_parallel_size`` ranks."""
    cpus_per_group: float = 0
    """CPUs that Ray reserves for a group; 0 places groups without counting CPUs. On GPUs, one
    GPU per rank is always reserved."""
    group_resource: str | None = None
    """A resource of the Ray cluster of which each group takes one, such as nodes may be labelled
    with to say what runs where; as for gateways below."""
    num_gateways: int = 1
    """Gateways. Several on one node share the ports below through SO_REUSEPORT."""
    gateway_resource: str | None = None
    host: str = "127.0.0.1"
    """Where gateways listen for clients; "0.0.0.0" serves the network."""
    grpc_port: int = 50051
    """0 takes any free port."""
    http_port: int = 8000
    """0 takes any free port."""
    group_host: str = "127.0.0.1"
    """Where groups listen for gateways: an address that every gateway's node can reach; "auto" is
    that of the group's own Ray node."""
    tls_certificate: Path | None = None
    """The gateways' certificate chain, PEM, with its key below; ``None`` serves without TLS. New
    files in the same places are taken up within a minute."""
    tls_key: Path | None = None
    api_keys_file: Path | None = None
    """One API key a line; clients must show one. ``None`` lets everyone in."""
    max_queue_wait_s: float = 10.0
    """A request that is predicted to wait for longer until a group begins it is refused at once."""
    standing_wait_s: float = 1.0
    """The same once no request has found a free group for as long as this."""
    max_queued_requests: int = 1024
    """Completions that may wait at a gateway."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens of these."""
    drain_timeout_s: float = 30.0
    """How long a stopping gateway or group lets its requests finish."""

    def __post_init__(self) -> None:
        for name in ("num_groups", "num_gateways"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}={value!r}: must be 1 or more")
        for name in ("grpc_port", "http_port"):
            value = getattr(self, name)
            if not 0 <= value <= 65535:
                raise ConfigError(f"{name}={value!r}: must be a port from 0 to 65535")
        if (self.tls_certificate is None) != (self.tls_key is None):
            given, missing = ("tls_certificate", "tls_key")
            if self.tls_certificate is None:
                given, missing = missing, given
            raise ConfigError(f"{given} is set and {missing} is not: set both or neither")
        self.admission()  # Checks its own part.
        if self.grpc_port == self.http_port != 0:
            raise ConfigError(
                f"grpc_port and http_port are both {self.grpc_port}: they must differ"
            )
        for name in ("cpus_per_group", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 0 or more")

    def admission(self) -> AdmissionConfig:
        """For each gateway."""
        return AdmissionConfig(
            max_queue_wait_s=self.max_queue_wait_s,
            standing_wait_s=self.standing_wait_s,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            num_gateways=self.num_gateways,
        )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.engine.model.resolve().name
