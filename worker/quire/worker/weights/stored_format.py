"""How a checkpoint stores the matrices of linear layers: which are quantised, and in which format.
Does not import torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from quire.worker.weights.patterns import pattern

LM_HEAD = "lm_head"
EVERY = "Linear"
"""The target that stands for each matrix of a linear layer."""
EXPRESSION = "re:"
"""How a target that is a regular expression begins."""
_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of scales; both multiply. Writers of fp8 without blocks use either name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """The storage format of a quantised matrix."""

    layout: Literal["gptq", "awq", "packed", "int8", "float8", "float4", "q4_0"]
    """The first three pack several integers into 32 bits, "float4" two values (E2M1) into 8. "q4_0"
    is GGUF's."""
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    """How many outputs and inputs share a scale; 0 means all."""
    symmetric: bool = True
    codes: str = "weight"
    """The name of the tensor of values, if the layout does not say it."""
    scale: str = "weight_scale"
    """The name of the tensor of scales."""
    are_powers: bool = False
    """Whether scales are powers of two, of which 8-bit exponents are stored (E8M0)."""
    global_scale: str | None = None
    """The name of one more scale, for the whole matrix."""
    divides: bool = False
    """Whether the global scale divides the others, and does not multiply them."""
    zero_offset: int = 0
    """Added to stored zero points."""
    order: str | None = None
    """The name of the tensor that maps inputs to groups; ``None`` if groups are consecutive."""
    may_lack_order: bool = False
    """Whether groups are consecutive in a checkpoint without such tensors."""

    def named_as_in(self, endings: set[str]) -> "StoredFormat":
        """A copy whose tensors of scales and of orders are those in ``endings``, the last parts of
        tensor names."""
        if self.may_lack_order and self.order not in endings:
            return replace(self, order=None)
        if self.scale in _SCALES:
            for scale in _SCALES:
                if scale in endings and self.scale not in endings:
                    return replace(self, scale=scale)
        return self


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Which matrices of a checkpoint are quantised, and how. Compared and hashed by value."""

    formats: tuple[tuple[str, StoredFormat | None], ...] = ()
    """The format of the modules that each target stands for; ``None``: they are not quantised.

    A target is a whole name or whole parts of one, a regular expression after ``re:``, or `EVERY`.
    If several stand for a module, the longest name counts, else the first expression in
    alphabetical order, else `EVERY` (as in compressed-tensors).
    """
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised whatever ``formats`` says: names, parts, or expressions."""
    has_mxfp4_experts: bool = False
    """Whether all experts of a layer are one tensor in MXFP4, as in gpt-oss."""

    @property
    def has_4_bits(self) -> bool:
        return self.has_mxfp4_experts or self.least_bits == 4

    @property
    def least_bits(self) -> int:
        """The bits of the smallest format."""
        return min([each.bits for _, each in self.formats if each is not None], default=8)

    def named_as_in(self, names: Iterable[str]) -> "StoredWeights":
        """A copy whose formats name tensors as in ``names``, the tensor names."""
        endings = {name.rpartition(".")[2] for name in names}
        formats = ((target, each and each.named_as_in(endings)) for target, each in self.formats)
        return replace(self, formats=tuple(formats))

    def format_of(self, *names: str) -> StoredFormat | None:
        """The format of a module, which is one matrix; ``None`` if it is not quantised. ``names``:
        the module's name in its decoder, and in its files if that is another."""
        if any(_matches(name, each) for name in names for each in self.ignored):
            return None
        parts = sorted({part for name in names for part in _parts(name)}, key=len, reverse=True)
        named = next((part for part in parts if part in self._by_target), None)
        if named is None:
            told = (
                each for each in self._expressions if any(_matches(name, each) for name in names)
            )
            named = next(told, EVERY)
        return self._by_target.get(named)

    @cached_property
    def _by_target(self) -> dict[str, StoredFormat | None]:
        return dict(self.formats)

    @cached_property
    def _expressions(self) -> list[str]:
        return sorted(target for target in self._by_target if target.startswith(EXPRESSION))


def _parts(name: str) -> Iterator[str]:
    """The whole parts of a name, in each length."""
    parts = name.split(".")
    for begin in range(len(parts)):
        for end in range(begin + 1, len(parts) + 1):
            yield ".".join(parts[begin:end])


def _matches(name: str, target: str) -> bool:
    if target.startswith(EXPRESSION):
        return pattern(target.removeprefix(EXPRESSION)).matches(name)
    return f".{target.strip('.')}." in f".{name}."
