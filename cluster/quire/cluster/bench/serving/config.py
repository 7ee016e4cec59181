"""What ``quire bench serve`` is asked to do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.worker.api.errors import ConfigError

OF_FILES = ("sharegpt", "custom", "trace")
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Which prompts are sent. Lengths are in tokens; those with a prefix in their names are of that
    dataset alone."""

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    """Lengths are uniform between (1 - ratio) and (1 + ratio) times the mean."""
    random_prefix_len: int = 0
    """Shared by all prompts, in front of ``random_input_len``."""
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    output_len: int | None = None
    """Output tokens to ask for, instead of the number that a file of text says."""
    trace_format: str | None = None
    trace_speed: float = 1.0
    """How many times as fast as the trace's requests came."""

    def __post_init__(self) -> None:
        for name, least in (
            *(("num_prompts", 1), ("random_input_len", 1), ("random_output_len", 1)),
            *(("random_prefix_len", 0), ("prefix_repetition_prefix_len", 0)),
            *(("prefix_repetition_suffix_len", 1), ("prefix_repetition_num_prefixes", 1)),
            *(("prefix_repetition_output_len", 1), ("output_len", 1), ("seed", 0)),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: must be {least} or more")
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio={self.random_range_ratio}: must be 0 or more, and below 1"
            )
        if self.trace_speed <= 0:
            raise ConfigError(f"trace_speed={self.trace_speed}: must be above 0")
        if self.name in OF_FILES and self.path is None:
            raise ConfigError(f"dataset_name={self.name}: also give --dataset-path, its file")
        if self.name not in OF_FILES and self.path is not None:
            raise ConfigError(
                f"dataset_path={self.path}: {self.name} is made up; give --dataset-name, one of "
                f"{', '.join(OF_FILES)}"
            )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """When requests are sent."""

    request_rate: float | None = None
    """A second; infinite is all at once. If absent a trace's own times, else all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is a Poisson process, less comes in bursts."""
    max_concurrency: int | None = None
    """Requests under way at a time; those beyond wait in the client."""
    num_warmups: int = 0
    """Requests sent before, one by one, which are not counted."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is no rate either.
                raise ConfigError(f"{name}={value}: must be above 0")
        if self.burstiness == inf:
            raise ConfigError("burstiness=inf: give a large number, such as 1000, for even gaps")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency}: must be 1 or more")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups}: must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and the fields that every request to it has."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    """The first of /v1/models if absent."""
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    """Whether any certificate will do."""
    timeout_s: float = 3600.0
    """The limit of one request, from sending to its end."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request, over those that the load sets."""

    def __post_init__(self) -> None:
        if not _is_address(self.base_url):
            raise ConfigError(f"base_url={self.base_url}: must be http://HOST:PORT, or https")
        if not self.endpoint.endswith("/completions"):
            raise ConfigError(
                f"endpoint={self.endpoint}: give a path that ends in /completions or "
                "/chat/completions"
            )
        for name, value in [("Authorization", self.api_key or ""), *self.headers.items()]:
            if not f"{name}{value}".isprintable():
                raise ConfigError(f"header {name}: has a line break or the like, and must not")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s={self.timeout_s}: must be above 0")

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def url(self, path: str) -> str:
        """``path`` there. A base that ends in /v1, as OpenAI's client wants it, is taken too."""
        base = self.base_url.rstrip("/")
        if base.endswith("/v1") and path.startswith("/v1/"):
            base = base.removesuffix("/v1")
        return f"{base}/{path.lstrip('/')}"


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """One run."""

    target: Target
    dataset: Dataset
    traffic: Traffic
    tokenizer: str | None = None
    """A folder, a file or a name on the hub, for lengths of text and the ids that prompts are made
    up of."""
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Objectives in milliseconds; a request that meets all of them is good."""
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    shows_progress: bool = True
    """Only where there is a terminal."""
    save_result: bool = False
    save_detailed: bool = False
    """Whether the result has the figures of each request too."""
    result_dir: Path = Path()
    result_filename: str | None = None
    """One with the label, the rate, the model and the time if absent."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("percentile_metrics", self.metrics, METRICS),
            ("goodput", self.goodput, OBJECTIVES),
        ):
            for each in given:
                if each not in known:
                    raise ConfigError(f"{name}={each}: must be of {', '.join(known)}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"metric_percentiles={percentile:g}: must be 0 to 100")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is none.
        return False
