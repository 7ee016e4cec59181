"""Configuration of ``quire bench serve``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quire.worker.request.errors import ConfigError

OF_FILES = ("sharegpt", "custom", "trace")
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The prompts to send. Lengths are in tokens. Fields named after a dataset apply only to it."""

    name: str = "random"
    path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    """Lengths are uniform between (1 - ratio) and (1 + ratio) times the mean."""
    random_prefix_len: int = 0
    """Length of a prefix shared by all prompts, in front of ``random_input_len``."""
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    output_len: int | None = None
    """Output tokens to request, instead of the number in a file of texts."""
    trace_format: str | None = None
    trace_speed: float = 1.0
    """Factor by which the trace's requests are sent faster than they arrived."""

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
    """Requests per second; infinite sends all at once. If absent: a trace's own times, else all at
    once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is a Poisson process, smaller values are
    burstier."""
    max_concurrency: int | None = None
    """Most concurrent requests; further ones wait in the client."""
    num_warmups: int = 0
    """Requests sent beforehand, one by one, and not counted."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is not a rate either.
                raise ConfigError(f"{name}={value}: must be above 0")
        if self.burstiness == inf:
            raise ConfigError("burstiness=inf: give a large number, such as 1000, for even gaps")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency={self.max_concurrency}: must be 1 or more")
        if self.num_warmups < 0:
            raise ConfigError(f"num_warmups={self.num_warmups}: must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, and fields that are added to every request."""

    base_url: str
    endpoint: str = "/v1/completions"
    model: str | None = None
    """Model name; if absent, the first of /v1/models."""
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    """Whether any TLS certificate is accepted."""
    timeout_s: float = 3600.0
    """Time limit of one request in seconds, from sending to its end."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Extra fields of every request; they override those of the load."""

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
        """The URL of ``path``. The base may end in /v1, as OpenAI's client expects."""
        base = self.base_url.rstrip("/")
        if base.endswith("/v1") and path.startswith("/v1/"):
            base = base.removesuffix("/v1")
        return f"{base}/{path.lstrip('/')}"


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """The configuration of one run."""

    target: Target
    dataset: Dataset
    traffic: Traffic
    tokenizer: str | None = None
    """A folder, a file or a name on the hub, for counting tokens of texts and for the token ids of
    generated prompts."""
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (99.0,)
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Objectives in milliseconds. A request that meets all of them counts as good."""
    label: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    shows_progress: bool = True
    """Whether to show progress; it is shown only in a terminal."""
    save_result: bool = False
    save_detailed: bool = False
    """Whether the result includes each request's figures."""
    result_dir: Path = Path()
    result_filename: str | None = None
    """If absent, a name with the label, the rate, the model and the time."""

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
    except ValueError:  # The port is not a number.
        return False
