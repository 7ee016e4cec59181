"""The number of KV blocks of an engine, from block sizes and the machine's free memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.worker.model.config import read_model_spec
from quire.worker.rank import kv as kv_cache
from quire.worker.rank.executor import make_executor
from quire.worker.request.errors import ConfigError

ConfigOf = Callable[..., Any]
GIB = 1 << 30


def layout(config: Any) -> kv_cache.KvLayout:
    return kv_cache.kv_layout(config, read_model_spec(config.model).attentions, dtype="float32")


def meminfo(tmp_path: Path, available_kib: int) -> Path:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    return file


def test_a_block_is_k_and_v_of_every_layer(config_of: ConfigOf, tiny_llama: Path) -> None:
    # 2 layers of 2 KV heads of 16, float32
    assert layout(config_of(tiny_llama, block_size=8)).block_bytes == 2 * 2 * 8 * 2 * 16 * 4
    halved = layout(config_of(tiny_llama, block_size=8, tensor_parallel_size=2))
    assert halved.block_bytes == 2 * 2 * 8 * 1 * 16 * 4
    replicated = layout(config_of(tiny_llama, block_size=8, tensor_parallel_size=4))
    assert replicated.num_kv_heads == 1


def test_an_int8_block_holds_a_byte_for_each_value_and_a_float_for_each_token_and_head(
    config_of: ConfigOf, tiny_llama: Path
) -> None:
    config = config_of(tiny_llama, block_size=8, kv_cache_dtype="int8")
    assert layout(config).block_bytes == 2 * 2 * 8 * 2 * (16 + 4)
    kv = kv_cache.allocate(layout(config), num_blocks=3, device=torch.device("cpu"))
    assert sum(cache.nbytes for layer in kv for cache in layer) == 3 * layout(config).block_bytes


def test_a_float8_cache_is_refused_on_a_cpu(config_of: ConfigOf, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8': only the kernels for GPUs"):
        make_executor(config_of(tiny_llama, kv_cache_dtype="fp8"))
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype='fp4': one of \('auto', 'int8', 'fp8'\)"
    ):
        config_of(tiny_llama, kv_cache_dtype="fp4")


@pytest.mark.slow
def test_more_host_memory_than_is_free_is_refused(config_of: ConfigOf, tiny_llama: Path) -> None:
    for size in (1, 2):
        config = config_of(tiny_llama, kv_offloading_size=1e6, tensor_parallel_size=size)
        with pytest.raises(ConfigError, match=r"kv_offloading_size=1e\+06: only .* are free here"):
            make_executor(config)


def test_bytes_are_of_the_whole_group(config_of: ConfigOf, tiny_llama: Path) -> None:
    for size in (1, 2):
        config = config_of(
            tiny_llama,
            num_blocks=None,
            kv_cache_memory_bytes=1_000_000,
            tensor_parallel_size=size,
        )
        blocks = kv_cache.plan_num_blocks(config, layout(config), share_bytes=1)
        assert blocks == 1_000_000 // (2 * 2 * 16 * 2 * 16 * 4)


def test_the_default_share_of_the_ram_is_bounded(
    config_of: ConfigOf, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share(free: int, **fields: Any) -> int:
        monkeypatch.setattr(kv_cache, "available_ram_bytes", lambda: free)
        return kv_cache.cpu_share_bytes(config_of(tiny_llama, **fields))

    assert share(5 * GIB) == 2 * GIB
    assert share(64 * GIB) == 4 * GIB
    assert share(64 * GIB, tensor_parallel_size=2) == 2 * GIB
    assert share(64 * GIB, gpu_memory_utilization=0.5) == 32 * GIB


def test_free_ram_is_that_of_the_container_where_it_is_less(tmp_path: Path) -> None:
    file = meminfo(tmp_path, 8 * GIB // 1024)
    assert kv_cache.available_ram_bytes(file, tmp_path) == 8 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text(f"{GIB}\n")
    assert kv_cache.available_ram_bytes(file, tmp_path) == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{3 * GIB}\n")
    assert kv_cache.available_ram_bytes(file, tmp_path) == 2 * GIB
    (tmp_path / "memory.current").write_text(f"{4 * GIB}\n")
    assert kv_cache.available_ram_bytes(file, tmp_path) == 0


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_remedy(
    config_of: ConfigOf, tiny_llama: Path, runner_of: Any
) -> None:
    with pytest.raises(
        ConfigError, match=r"holds 3 blocks of 16 tokens, but one sequence of "
    ) as e:
        runner_of(tiny_llama, num_blocks=3)
    assert "max_model_len=512 needs 32: set num_blocks=32 or more" in str(e.value)
    assert "lower max_model_len to at most 48" in str(e.value)
    with pytest.raises(ConfigError) as e:
        runner_of(tiny_llama, num_blocks=None, kv_cache_memory_bytes=100_000)
    assert "gpu_memory_utilization" not in str(e.value)  # It has no effect then.
    needed = int(str(e.value).split("kv_cache_memory_bytes=")[1].split()[0])
    fits = runner_of(tiny_llama, num_blocks=None, kv_cache_memory_bytes=needed)
    assert fits.num_blocks_that_fit() == 32
    with pytest.raises(ConfigError):
        runner_of(tiny_llama, num_blocks=None, kv_cache_memory_bytes=needed - 1)
