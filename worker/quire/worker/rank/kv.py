"""Computes how many blocks of KV fit into memory, and allocates the tensors for them.

``num_blocks`` is the same on every rank: each rank reports how many it has room for, and the group
takes the least. If memory is committed on first touch (CPU), a block costs nothing until used.

Only what uses a device imports torch, so that a start can check the room before any group runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.kernels.quantization import SCALE_BYTES
from quire.worker.blocks.kv_format import KvFormat
from quire.worker.model.config import resolve_dtype, resolve_max_model_len
from quire.worker.model.spec import Attention, ModelSpec
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from quire.kernels.ops import KvCache

CPU_SHARE = 0.4
CPU_MAX_BYTES = 4 << 30
"""Limit of the default share in bytes, so that a laptop stays usable."""
GPU_SHARE = 0.9

_FP8 = "float8_e4m3fn"
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, _FP8: 1}
"""By torch's name of the type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLayout:
    """The shape of one rank's KV cache, without the number of blocks."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    """KV heads of this rank."""
    head_size: int
    dtype: str
    """torch's name of the type."""

    @property
    def width(self) -> int:
        """Elements of one token and head: its values and, for int8, the bytes of their scale."""
        return self.head_size + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def head_bytes(self) -> int:
        """Bytes of K or V of one token and head."""
        return self.width * _ITEM_BYTES[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self.num_layers * self.block_size * self.layer_token_bytes


def kv_layout(config: EngineConfig, attentions: Sequence[Attention], *, dtype: str) -> KvLayout:
    """The layout of a rank's KV cache. ``attentions`` are those of the layers, with equal heads.
    ``dtype`` is torch's name of the model's type; the cache's may differ."""
    attention = attentions[0]
    stored = {"auto": dtype, "fp8": _FP8}
    return KvLayout(
        num_layers=len(attentions),
        block_size=config.block_size,
        num_kv_heads=max(1, attention.num_kv_heads // config.tensor_parallel_size),
        head_size=attention.cached_size,
        dtype=stored.get(config.kv_cache_dtype, config.kv_cache_dtype),
    )


def kv_format(layout: KvLayout, attention: Attention) -> KvFormat:
    """The layout of a block outside the cache, with the KV heads of all ranks."""
    return KvFormat(
        num_layers=layout.num_layers,
        num_kv_heads=attention.num_kv_heads,
        head_bytes=layout.block_size * layout.head_bytes,
        block_size=layout.block_size,
    )


def plan_num_blocks(config: EngineConfig, layout: KvLayout, *, share_bytes: int) -> int:
    """Blocks for one rank: as configured, or as many as fit into ``share_bytes``."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        share_bytes = config.kv_cache_memory_bytes // config.tensor_parallel_size
    return max(0, share_bytes) // layout.block_bytes


def check_room(
    config: EngineConfig, layout: KvLayout, *, num_blocks: int, max_model_len: int
) -> None:
    """Checks that at least one sequence of the greatest length fits.

    Raises:
        ConfigError: It does not fit, so that a request could wait forever.
    """
    needed = -(-max_model_len // layout.block_size)
    if num_blocks >= needed:
        return
    room = f"the KV cache holds {num_blocks} blocks of {layout.block_size} tokens"
    if config.num_blocks is not None:
        remedy = f"set num_blocks={needed} or more"
    else:
        needed_bytes = needed * layout.block_bytes * config.tensor_parallel_size
        remedy = f"set kv_cache_memory_bytes={needed_bytes} or more"
        if config.kv_cache_memory_bytes is None:
            share = config.gpu_memory_utilization or "its default"
            remedy += f", raise gpu_memory_utilization (now {share})"
    if num_blocks:
        remedy += f", or lower max_model_len to at most {num_blocks * layout.block_size}"
    raise ConfigError(
        f"{room}, but one sequence of max_model_len={max_model_len} needs {needed}: {remedy}"
    )


def check_memory_here(config: EngineConfig, spec: ModelSpec) -> None:
    """Checks, before any weights are read, that one rank on this machine's CPUs has memory for its
    KV. Groups check it again, with less memory left. The layers of a model that runs through
    transformers are not known yet.

    Raises:
        ConfigError: It has not.
    """
    check_host_memory(config)
    if spec.through_transformers is None:
        layout = kv_layout(config, spec.attentions, dtype=resolve_dtype(config, spec))
        num_blocks = plan_num_blocks(config, layout, share_bytes=cpu_share_bytes(config))
        max_model_len = resolve_max_model_len(config, spec)
        check_room(config, layout, num_blocks=num_blocks, max_model_len=max_model_len)


def check_host_memory(config: EngineConfig) -> None:
    """Raises ConfigError: more host memory is asked for than is free. It is all touched soon."""
    gib = config.kv_offloading_size
    if gib and gib * 2**30 > (free := available_ram_bytes()):
        raise ConfigError(
            f"kv_offloading_size={gib:g}: only {free / 2**30:.1f} GiB of memory are free here: "
            "set less, or keep blocks on disk (kv_disk_dir)"
        )


def cpu_share_bytes(config: EngineConfig) -> int:
    """Bytes of the free RAM that one rank may use for KV."""
    share = config.gpu_memory_utilization
    free = available_ram_bytes()
    total = min(int(free * CPU_SHARE), CPU_MAX_BYTES) if share is None else int(free * share)
    return total // config.tensor_parallel_size


def gpu_share_bytes(config: EngineConfig, device: "torch.device", *, peak_bytes: int) -> int:
    """Bytes of device memory left for KV. ``peak_bytes`` is the most that a step allocates,
    including weights; memory outside this process's allocator is subtracted too."""
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * (config.gpu_memory_utilization or GPU_SHARE)) - others - peak_bytes


def available_ram_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free RAM in bytes: of the machine or, if that is less, of this process's container."""
    available = _meminfo_available(meminfo)
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_int(cgroup / limit_name), _read_int(cgroup / used_name)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def allocate(layout: KvLayout, *, num_blocks: int, device: "torch.device") -> "KvCache":
    """Uninitialised K and V of every layer. Slots are undefined until they are written."""
    import torch

    dtype = getattr(torch, layout.dtype)
    shape = (num_blocks, layout.block_size, layout.num_kv_heads, layout.width)
    return [
        (
            torch.empty(shape, dtype=dtype, device=device),
            torch.empty(shape, dtype=dtype, device=device),
        )
        for _ in range(layout.num_layers)
    ]


def _meminfo_available(meminfo: Path) -> int:
    for line in meminfo.read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"{meminfo} does not say MemAvailable: set kv_cache_memory_bytes")


def _read_int(file: Path) -> int | None:
    """The number in a file; ``None`` if there is no such file, or it says "max"."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
