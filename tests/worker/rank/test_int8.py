"""A whole model in int8 and w4 is near float32, with and without the native library."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.native import library as native
from quire.worker.rank.runner import pick_device
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

INT8 = {"quantization": "int8", "kv_cache_dtype": "int8"}
PROMPT = list(range(3, 60))


@pytest.fixture
def logits(runner_of: Any, driver: Any, row: Any) -> Callable[..., torch.Tensor]:
    """Logits of a prompt's last token, computed in two chunks so that it reads the cache."""

    def run(model: Path, **settings: Any) -> torch.Tensor:
        runner, blocks = runner_of(model, **settings), [5, 2, 9, 0]
        runner.forward(driver.step([row(PROMPT[:30], blocks)]))
        found: torch.Tensor = runner.forward(driver.step([row(PROMPT, blocks, done=30)]))
        return found[0]

    return run


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}, INT8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_llama_9_3", "tiny_llama_with_biases"])
def test_logits_are_near_those_of_float32(
    logits: Callable[..., torch.Tensor],
    request: pytest.FixtureRequest,
    model: str,
    dtype: str,
    settings: dict[str, Any],
) -> None:
    path = request.getfixturevalue(model)
    exact = logits(path, dtype="float32")
    error = (logits(path, dtype=dtype, **settings) - exact).square().mean().sqrt()
    assert 1e-4 < error / exact.std() < 0.1


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_llama_9_3", "tiny_llama_with_biases"])
def test_plain_pytorch_computes_the_same(
    logits: Callable[..., torch.Tensor],
    request: pytest.FixtureRequest,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(model)
    with_library = logits(path, **INT8)
    monkeypatch.setattr(native, "library", lambda: None)
    # A last bit that changes a rounding to 8 bits matters far less than the 8 bits themselves.
    error = (logits(path, **INT8) - with_library).square().mean().sqrt()
    assert error / with_library.std() < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_llama_9_3", "tiny_llama_with_biases"])
def test_w4_is_near_float32_and_plain_pytorch_near_that(
    logits: Callable[..., torch.Tensor],
    request: pytest.FixtureRequest,
    model: str,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = request.getfixturevalue(model)
    exact = logits(path, dtype="float32")
    with_library = logits(path, dtype=dtype, quantization="w4")
    error = (with_library - exact).square().mean().sqrt()
    assert 0.01 < error / exact.std() < 0.5
    monkeypatch.setattr(native, "library", lambda: None)
    difference = (logits(path, dtype=dtype, quantization="w4") - with_library).square().mean()
    assert difference.sqrt() / exact.std() < 0.1


def test_half_precision_has_int8_in_plain_pytorch(
    logits: Callable[..., torch.Tensor], tiny_llama: Path
) -> None:
    exact = logits(tiny_llama)
    error = (logits(tiny_llama, dtype="float16", **INT8) - exact).square().mean().sqrt()
    assert error / exact.std() < 0.1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"quantization": "w4"}, "quantization='w4'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8'"),
    ],
)
def test_a_gpu_that_was_found_only_now_is_refused_by_name(
    settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=Path("none"), device="auto", **settings)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=f"{named}: only the kernels for CPUs have it; set"):
        pick_device(config, rank=0)
