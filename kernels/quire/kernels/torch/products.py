"""Makes cuBLAS products batch-invariant: a row's bits do not depend on the other rows.

cuBLAS chooses among its kernels by the shape of a product. On Hopper the only choice that changes
how a row is summed is split-K, in which several blocks add parts of K; it is used for few rows. It
needs a workspace: without one, and with reductions in float32, the order of a row's sum stays the
same. `bench.gpu` measures both, whether rows keep their bits at 1 to 2,048 rows and what that
costs.
"""

import os
import warnings

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
}
"""Sizes of the workspace in KiB, which PyTorch reads when it first calls the library."""


def make_batch_invariant() -> None:
    """Configures this process. Call it before the first product on a GPU.

    Warns if the process has used a GPU already, since the library may have its workspace by then.
    """
    missing = {name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value}
    if missing and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warnings.warn(
            "this process has used a GPU before the engine: products may depend on the batch; set "
            + " ".join(f"{name}={value}" for name, value in missing.items())
            + " before it starts, or deterministic=False",
            stacklevel=2,
        )
    os.environ.update(ENVIRONMENT)
    matmul = torch.backends.cuda.matmul
    # No reductions in 16 bits, no split-K.
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    matmul.allow_fp16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")
