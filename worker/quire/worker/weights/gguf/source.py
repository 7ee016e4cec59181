"""Opens a GGUF file as a checkpoint: its description and its tensors. Does not import torch."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import Checkpoint, TensorInfo
from quire.worker.weights.gguf.container import StoredTensor, parts_of, read_model
from quire.worker.weights.gguf.describe import describe
from quire.worker.weights.gguf.names import PlacedTensor, placed

_NOT_DECODED = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K", "Q1_0", "NVFP4"}
"""Types that are not used for weights, or whose values are spread over several tensors."""
_NOT_QUANTISED = {"F32", "F16", "BF16"}


def open_gguf(file: Path) -> Checkpoint:
    """The tensors of ``file`` and of its other parts, by their names in a safetensors checkpoint.

    Raises:
        CheckpointError: A file is missing, damaged or of an unsupported kind.
    """
    header = read_model(file)
    tensors = placed(header, describe(header))
    sizes = {part: part.stat().st_size for part in parts_of(file)}
    for stored in header.tensors.values():
        _check_whole(stored, sizes[stored.file])
    files = tuple(sizes)
    named: dict[str, TensorInfo] = {
        name: replace(tensor, name=name) for name, tensor in tensors.items()
    }
    return Checkpoint(path=file.parent, files=files, tensors=named, decoded=_decoded(tensors))


def _decoded(tensors: Mapping[str, PlacedTensor]) -> str:
    """A summary of the tensors that are decoded; empty if none is quantised."""
    parts: dict[str, set[StoredTensor]] = {"values": set(), "codes": set(), "scales": set()}
    for tensor in tensors.values():  # Tensors of experts occur several times.
        if GGMLQuantizationType(tensor.stored.type).name not in _NOT_QUANTISED:
            parts[tensor.part].add(tensor.stored)
    said = []
    if kept := parts["codes"]:
        said.append(f"{_counted(kept)} kept in blocks of 4 bits")
    if decoded := parts["values"]:
        num_bytes = 2 * sum(math.prod(stored.shape) for stored in decoded)
        said.append(f"{_counted(decoded)} decoded at load: {num_bytes / 1e6:,.1f} MB in bfloat16")
    return "; ".join(said)


def _counted(tensors: set[StoredTensor]) -> str:
    kinds = Counter(GGMLQuantizationType(stored.type).name for stored in tensors)
    types = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    plural = "s" if len(tensors) > 1 else ""
    return f"{len(tensors)} tensor{plural} ({types}; {sum(map(_num_bytes, tensors)) / 1e6:,.1f} MB)"


def _check_whole(stored: StoredTensor, size: int) -> None:
    """Raises CheckpointError: the tensor's type is unsupported, or it exceeds its file, which has
    ``size`` bytes."""
    where = f"{stored.file}: tensor {stored.name!r}"
    try:
        kind = GGMLQuantizationType(stored.type)
    except ValueError:
        kind = None
    if kind is None or kind.name in _NOT_DECODED:
        name = "" if kind is None else f" ({kind.name})"
        raise CheckpointError(
            f"{where} has type {stored.type}{name}, which is not read: get the model in "
            "another quantization, such as Q8_0 or Q4_K_M"
        )
    block, _ = GGML_QUANT_SIZES[kind]
    if stored.shape[-1] % block:
        raise CheckpointError(
            f"{where} has rows of {stored.shape[-1]} values, which are no whole blocks of "
            f"{kind.name}: get a sound copy"
        )
    end = stored.offset + _num_bytes(stored)
    if end > size:
        raise CheckpointError(
            f"{stored.file}: {size} bytes, but tensor {stored.name!r} ends at {end}: the file is "
            "truncated or damaged, get it again"
        )


def _num_bytes(stored: StoredTensor) -> int:
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(stored.type)]
    return math.prod(stored.shape) // block * block_bytes
