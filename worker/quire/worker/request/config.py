"""Settings of an engine, checked before anything starts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.kernels.quantization import KvCacheDType, Quantization
from quire.worker.request.settings import Branch, setting

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
MAX_LORAS, MAX_LORA_RANK = 1024, 256
STAGING_BYTES = 64 << 20
"""Host memory through which blocks travel."""

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
ModelImpl = Literal["auto", "quire", "transformers"]
SchedulingPolicy = Literal["fcfs", "shortest_prefill"]

_KINDS = {"cpu": "CPUs", "cuda": "GPUs"}
_ONLY_ON = (
    ("quantization", "int8", "cpu"),
    ("quantization", "w4", "cpu"),
    ("kv_cache_dtype", "int8", "cpu"),
    ("kv_cache_dtype", "fp8", "cuda"),
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Branch):
    """The settings of one replica group's engine.

    Raises:
        ConfigError: A value cannot work; the message names it and what would be right.
    """

    title = "engine"

    model: Path
    """A checkpoint directory in Hugging Face format (safetensors). In a `ClusterConfig` also
    ``ORG/NAME[@REVISION]`` of the hub (`quire.worker.model.hub`)."""
    model_impl: ModelImpl = "auto"
    """Implementation of the model: "quire" uses Quire's description of its family, "transformers"
    the modules of that library; "auto" is "quire" for families that Quire describes."""
    tensor_parallel_size: int = setting(1, short="-tp")
    """Ranks that share each layer; must divide the model's attention heads."""
    dtype: DType = "auto"
    """Type of weights, activations and KV; "auto" is the checkpoint's own."""
    quantization: Quantization | None = None
    """"int8" rounds weights and the inputs of linear layers to 8 bits while they are multiplied,
    "w4" weights alone to 4 bits (CPU only); the checkpoint stays as it is. If absent, neither."""
    kv_cache_dtype: KvCacheDType = "auto"
    """"auto" keeps K and V as they are computed; "int8" (CPU) and "fp8" (float8_e4m3fn, GPU) in 8
    bits: half the memory of 16."""
    device: Device = "auto"
    """"auto" is "cuda" if there is a GPU, else "cpu"."""
    enforce_eager: bool = False
    """On a GPU, launch decodes kernel by kernel instead of as CUDA graphs. That starts sooner,
    leaves a little more memory for KV, and is slower in small batches."""
    deterministic: bool = True
    """On a GPU, use only batch-invariant matrix products. Otherwise tokens may depend on the other
    requests in the batch. On CPUs they never do, except for models that run through transformers
    with operations that are known to depend on the batch: with this setting, such a model is
    refused."""
    block_size: int = setting(16, choices=BLOCK_SIZES)
    """Tokens of KV cache in a block: a power of two from 4 to 128."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory for weights, activations and KV together (GPU, default 0.9),
    or share of the free RAM for KV (CPU; default 0.4, but 4 GiB at most)."""
    kv_cache_memory_bytes: int | None = None
    """KV cache of the whole group in bytes, instead of a share."""
    num_blocks: int | None = setting(None, flag=None)
    """Blocks in the KV cache, instead of a share or bytes; mainly for tests and experiments."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; if absent, the limit of the
    checkpoint."""
    max_num_seqs: int = 128
    """Most sequences that run at the same time."""
    max_num_batched_tokens: int = 2048
    """Most tokens that one step computes, in decodes and prefill chunks together."""
    max_num_waiting: int = setting(4096, flag=None)
    """Most requests that wait in the engine; one more is refused."""
    scheduling_policy: SchedulingPolicy = "shortest_prefill"
    """Order of prompts of the same priority: the least remaining work first, with an allowance for
    waiting, or with "fcfs" the order of arrival."""
    enable_prefix_caching: bool = True
    """Reuse the KV of common prefixes."""
    kv_offloading_size: float = 0.0
    """GiB of host memory of the whole group for blocks that the KV cache evicts."""
    kv_disk_dir: Path | None = None
    """A folder on a local disk for blocks beyond that, also across restarts."""
    kv_disk_size: float = 16.0
    """Most GiB that this engine uses in ``kv_disk_dir``."""
    kv_transfer: bool | None = None
    """Fetch KV blocks from other groups, and lend blocks to them. If absent, on if a cluster may
    run several groups of the model and each is on one node."""
    kv_events: bool = False
    """Remember the tokens of cached blocks, so that gateways can report to other routers, which
    call SubscribeKvEvents, what is cached; takes some 200 bytes of memory for each block of 16
    tokens."""
    seed: int = 0
    """Seed from which requests without their own seed get one."""
    num_threads: int | None = None
    """CPU threads of each rank; if absent, the machine's cores are divided among the ranks."""
    async_scheduling: bool | None = None
    """Prepare the next step while one runs. If absent, on for GPUs."""
    speculation: bool | None = None
    """Speculative decoding without a draft model when few sequences run, which changes no token.
    If absent, on for CPUs. Not with ``async_scheduling``."""
    enable_lora: bool = False
    """Serve LoRA adapters of the model, for those requests that name one."""
    max_loras: int = 8
    """Most different adapters in one step. If more have requests, they take turns."""
    max_lora_rank: int = 64
    """Greatest rank of an adapter; 256 at most."""
    max_cpu_loras: int | None = None
    """Adapters kept in memory; if absent, four times ``max_loras``."""
    step_timeout_s: float = setting(60.0, flag=None)
    """If a step takes longer, a rank hangs, and the group fails."""

    def _check(self) -> None:
        object.__setattr__(self, "model", Path(self.model))
        if self.kv_disk_dir is not None:  # Ranks may run in other working directories.
            object.__setattr__(self, "kv_disk_dir", Path(self.kv_disk_dir).absolute())
        must = self._must
        must(
            self.enable_prefix_caching or not self.kv_events,
            "kv_events",
            "needs enable_prefix_caching, since only cached blocks are told of; leave one out",
        )
        for name in ("kv_offloading_size", "kv_disk_size"):
            must(0 <= getattr(self, name) < 2**20, name, "must be 0 or more, in GiB")
        blocks = f"must be a power of two from {BLOCK_SIZES[0]} to {BLOCK_SIZES[-1]}"
        must(self.block_size in BLOCK_SIZES, "block_size", blocks)
        self.check_device(self.device)
        must(
            self.gpu_memory_utilization is None or 0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            "must be above 0 and at most 1; for a figure in bytes use kv_cache_memory_bytes",
        )
        self._must_be_at_least(
            1,
            *("tensor_parallel_size", "kv_cache_memory_bytes", "num_blocks", "max_model_len"),
            *("num_threads", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting"),
        )
        must(
            self.max_num_batched_tokens >= self.max_num_seqs,
            "max_num_batched_tokens",
            f"must be at least max_num_seqs ({self.max_num_seqs}): each running sequence "
            "decodes one token a step",
        )
        must(
            not (self.speculation and self.async_scheduling),
            "speculation",
            "async_scheduling asks for steps before the tokens that guesses follow; leave one out",
        )
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_LORA_RANK)):
            must(1 <= getattr(self, name) <= most, name, f"must be from 1 to {most}")
        must(
            self.max_cpu_loras is None or self.max_cpu_loras >= self.max_loras,
            "max_cpu_loras",
            f"must be at least max_loras ({self.max_loras})",
        )
        must(self.step_timeout_s > 0, "step_timeout_s", "must be above 0")

    def check_device(self, device: str) -> None:
        """Checks what only one kind of device can do, now that it is known what "auto" is.

        Raises:
            ConfigError: It was asked for on the other kind.
        """
        for name, value, only in _ONLY_ON:
            other = "cuda" if only == "cpu" else "cpu"
            rule = (
                f"only the kernels for {_KINDS[only]} have it; set device={only!r}, or leave it out"
            )
            self._must(device != other or getattr(self, name) != value, name, rule)

    @property
    def host_kv_bytes(self) -> int:
        """Host memory for blocks outside the cache: those that it keeps, and those that travel."""
        travels = bool(self.kv_transfer) or self.kv_disk_dir is not None
        staging_bytes = STAGING_BYTES if travels or self.kv_offloading_size else 0
        return int(self.kv_offloading_size * 2**30) + staging_bytes

    @property
    def num_kept_loras(self) -> int:
        """``max_cpu_loras``, resolved."""
        return self.max_cpu_loras or 4 * self.max_loras

    def num_ahead(self, *, is_gpu: bool) -> int:
        """Steps to submit before the result of the one before them, on such a device."""
        return int(is_gpu if self.async_scheduling is None else self.async_scheduling)
