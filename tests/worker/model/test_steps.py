"""Modules behind a pooling compute what torch's computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.worker.model.pooling import Activation, Cut, Dense, LayerNorm, Normalize
from quire.worker.model.steps import make_step
from quire.worker.request.errors import CheckpointError

VECTOR = torch.linspace(-3, 4, 8)


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"])
@pytest.mark.parametrize(
    ("num_out", "has_residual"), [(8, False), (8, True), (5, False), (5, True)]
)
def test_a_dense_layer_is_torchs(
    activation: Activation, num_out: int, has_residual: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    linear, residual = torch.nn.Linear(8, num_out), torch.nn.Linear(8, num_out, bias=False)
    is_projected = has_residual and num_out != 8
    tensors = {"linear.weight": linear.weight.data, "linear.bias": linear.bias.data}
    if is_projected:
        tensors["residual.weight"] = residual.weight.data
    save_file(tensors, tmp_path / "w.safetensors")
    settings: dict[str, Any] = {"num_in": 8, "num_out": num_out, "has_residual": has_residual}
    step = make_step(Dense(file=tmp_path / "w.safetensors", activation=activation, **settings))
    with torch.no_grad():
        truth = getattr(torch.nn, activation)()(linear(VECTOR))
        if has_residual:
            truth += residual(VECTOR) if is_projected else VECTOR
    np.testing.assert_allclose(step(VECTOR.numpy()), truth.numpy(), atol=1e-6)


def test_a_layer_norm_is_torchs(tmp_path: Path) -> None:
    norm = torch.nn.LayerNorm(8)
    norm.weight.data, norm.bias.data = torch.linspace(1, 2, 8), torch.linspace(-1, 1, 8)
    values = {"norm.weight": norm.weight.data, "norm.bias": norm.bias.data}
    save_file(values, tmp_path / "w.safetensors")
    step = make_step(LayerNorm(file=tmp_path / "w.safetensors", size=8))
    np.testing.assert_allclose(step(VECTOR.numpy()), norm(VECTOR).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_may_have_any_type_of_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 5).to(dtype)
    values = {"linear.weight": linear.weight.data, "linear.bias": linear.bias.data}
    save_file(values, tmp_path / "w.safetensors")
    step = make_step(
        Dense(file=tmp_path / "w.safetensors", num_in=8, num_out=5, activation="Identity")
    )
    truth = linear.float()(VECTOR).detach().numpy()
    np.testing.assert_allclose(step(VECTOR.numpy()), truth, atol=1e-6)


def test_weights_that_are_no_floats_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"norm.weight": torch.ones(8), "norm.bias": torch.ones(8, dtype=torch.int8)}, file)
    with pytest.raises(CheckpointError, match=r"norm\.bias' has type I8; it must be one of F64"):
        make_step(LayerNorm(file=file, size=8))


def test_vectors_are_normalized_and_cut() -> None:
    whole = make_step(Normalize())(VECTOR.numpy())
    np.testing.assert_allclose(whole, torch.nn.functional.normalize(VECTOR, dim=0), atol=1e-6)
    np.testing.assert_array_equal(make_step(Cut(3))(whole), whole[:3])


@pytest.mark.parametrize("names", [["linear.weight"], ["linear.weight", "linear.bias", "gate"]])
def test_a_file_with_other_tensors_is_refused(names: list[str], tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    shapes = {"linear.weight": (5, 8), "linear.bias": (5,), "gate": (5,)}
    save_file({name: torch.zeros(shapes[name]) for name in names}, file)
    with pytest.raises(CheckpointError, match=r"has the tensors .* asks for linear.bias \[5\], "):
        make_step(Dense(file=file, num_in=8, num_out=5, activation="Tanh"))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="is missing: only safetensors files are read"):
        make_step(LayerNorm(file=tmp_path / "model.safetensors", size=8))
