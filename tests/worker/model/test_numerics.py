"""A group's `numerics` string differs if and only if the bits of its results may differ."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.kernels.native import library as native
from quire.worker.rank.executor import make_executor

ConfigOf = Callable[..., Any]

SAY = """
import sys
from pathlib import Path
from quire.worker.request.config import EngineConfig
from quire.worker.rank.executor import make_executor
config = EngineConfig(model=Path(sys.argv[1]), num_blocks=40, num_threads=1, device="cpu")
executor, _ = make_executor(config)
print(executor.numerics)
"""


def said(config: Any) -> str:
    executor, _ = make_executor(config)
    executor.close()
    return executor.numerics


def said_by_process(model: Path, **environment: str) -> str:
    command = [sys.executable, "-c", SAY, str(model)]
    run = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


@pytest.mark.slow
def test_instruction_sets_and_the_fallback_are_told_apart(tiny_llama: Path) -> None:
    isas = native.available_isas()
    found = {isa: said_by_process(tiny_llama, QUIRE_NATIVE_ISA=isa) for isa in isas}
    found["plain"] = said_by_process(tiny_llama, QUIRE_NATIVE="0")
    assert len(set(found.values())) == len(found)
    for isa in isas:
        assert found[isa].startswith(f"cpu {isa}-")
    assert found["plain"].startswith("cpu plain ")
    lowest = min(native_torch_levels(), key=len)
    other_torch = said_by_process(tiny_llama, ATEN_CPU_CAPABILITY=lowest)
    assert (other_torch == found[isas[0]]) == (torch_level() == lowest)


@pytest.mark.parametrize(
    ("module", "name"), [("torch", "__version__"), ("quire.worker.model.numerics", "version")]
)
def test_versions_that_compute_or_choose_tokens_are_told_apart(
    config_of: ConfigOf, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    """Several versions of torch and llguidance are allowed; no stream moves between two of them."""
    before = said(config_of(tiny_llama))
    another = "9.9.9" if name == "__version__" else lambda package: "9.9.9"
    monkeypatch.setattr(sys.modules[module], name, another)
    after = said(config_of(tiny_llama))
    assert before != after
    assert ("torch 9.9.9" if module == "torch" else "llguidance 9.9.9") in after


def native_torch_levels() -> list[str]:
    return ["default", "avx2"]


def torch_level() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability().lower()


def test_types_of_numbers_are_told_apart(config_of: ConfigOf, tiny_llama: Path) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"quantization": "int8"},
        {"quantization": "w4"},
        {"kv_cache_dtype": "int8"},
    ]
    assert len({said(config_of(tiny_llama, **fields)) for fields in settings}) == len(settings)


@pytest.mark.slow
def test_settings_that_change_no_bits_are_not_told_apart(
    config_of: ConfigOf, tiny_llama: Path
) -> None:
    if native.library() is None:
        pytest.skip("plain PyTorch's sums depend on threads and ranks")
    settings: list[dict[str, Any]] = [
        {},
        {"num_threads": 2},
        {"max_num_seqs": 3},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
    ]
    assert len({said(config_of(tiny_llama, **fields)) for fields in settings}) == 1


@pytest.mark.slow
def test_ranks_that_divide_sums_in_another_way_are_told_apart(
    config_of: ConfigOf, tiny_llama_9_3: Path
) -> None:
    one, three = (said(config_of(tiny_llama_9_3, tensor_parallel_size=size)) for size in (1, 3))
    assert one != three
