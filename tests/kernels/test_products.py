"""PyTorch's settings for a GPU's matrix products take effect."""

import os

import pytest
import torch

from quire.kernels.torch.products import ENVIRONMENT, make_batch_invariant


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, "")
    # The only setting that a build without CUDA refuses to keep.
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name: name)


def test_no_product_may_split_k_or_reduce_in_16_bits() -> None:
    make_batch_invariant()
    assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
    matmul = torch.backends.cuda.matmul
    for dtype in ("bf16", "fp16"):
        assert not getattr(matmul, f"allow_{dtype}_reduced_precision_reduction")
        assert not getattr(matmul, f"allow_{dtype}_reduced_precision_reduction_split_k")


def test_a_process_that_has_used_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match="set CUBLAS_WORKSPACE_CONFIG=:16:8"):
        make_batch_invariant()
    make_batch_invariant()  # The right environment raises no warning.
