"""The operations of a forward pass. A program is a list of them, with their weights.

Operations read and write named values. A value is ``[T, channels]``, and after `Gather`
``[S, channels]``. `quire.kernels.loop` defines each operation in plain Python. A backend may run a
program in another way with the same results, and may first fuse operations
(`quire.kernels.rewrites`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Batch, GreedyEdits, WantedColumns

if TYPE_CHECKING:  # They import this module.
    from quire.kernels.torch.experts import Expert, Router

# T tokens of the step, packed   B sequences   M blocks of the longest   S rows that are sampled
# G of these that are greedy
# C hidden size   K KV heads (of this rank)   D head size   R half of the rotated channels
# E experts   V vocabulary   P positions   I, O a linear layer's input and output
# R an adapter's rank (of `LowRank`)

KvCache = list[tuple[Tensor, Tensor]]
"""K and V of each layer: ``[num_blocks, block_size, K, D]``; an int8 cache has `SCALE_BYTES` more
after the D. The layout within a block is up to the backend."""

Value = Literal["residual", "normed", "qkv", "queries", "attended", "hidden", "branch"]
NormKind = Literal["rms", "wide", "layer"]
""""wide" is an RMS norm with float32 weights that is rounded after the product with the weights
rather than before it; "layer" is a layer norm, rounded like "wide"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clamped:
    """gpt-oss' ``(up + 1) * gate * sigmoid(alpha * gate)``, with gates clamped to at most ``limit``
    and ups to ``-limit`` … ``limit``."""

    alpha: float
    limit: float


GateActivation = Literal["silu", "gelu_tanh"] | Clamped
SharedExpert = Literal["none", "plain", "gated"]
"""Whether there is a shared expert, and whether its weight is the sigmoid of a score."""


class LinearLayer(Protocol):
    """A linear layer from ``[T, I]`` to ``[T, O]``, with weights in a backend's layout. A row's
    bits do not depend on the other rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """The matrix's outputs (for a gated layer: gates and ups) and inputs."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """Cosines and sines of every position, float32."""

    cos_PR: Tensor
    sin_PR: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embed:
    """Sets ``out`` to the tokens' rows of the embedding."""

    weight_VC: Tensor
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """Sets ``out`` to the norm of ``x``."""

    weight_C: Tensor
    eps: float
    x: Value
    out: Value
    kind: NormKind = "rms"
    bias_C: Tensor | None = None
    """Only a norm of kind "layer" has one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """Sets ``out`` to the layer's output for ``x``, with the adapters that the batch selects."""

    name: str
    """The layer's name in the model, such as "layers.3.qkv"."""
    layer: LinearLayer
    x: Value
    out: Value
    adds: bool = False
    """Whether the output is added to ``out`` rather than replacing it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatedLinear:
    """Sets ``out`` to ``activation(gate) * up``, or to the formula of `Clamped`. The layer's
    product with ``x`` is gates, then ups."""

    name: str
    layer: LinearLayer
    """From `pack_gated_linear`, so it includes the activation."""
    x: Value
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Activate:
    """Applies GELU, in the approximation with tanh, to ``x``."""

    x: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """A LoRA adapter's update of some outputs of one linear layer: ``scale * B (A x)``.

    `quire.kernels.torch.low_rank` defines where values are rounded.
    """

    a_RI: Tensor
    """The columns of this rank's inputs. A and B have the model's type."""
    b_OR: Tensor
    """This rank's outputs, in the layer's order: the channels of Q and K are reordered as in the
    layer."""
    first_row: int
    """The first of the layer's outputs on this rank that it changes. The outputs of qkv are Q, K
    and V; those of gate_up are gates, then ups."""
    scale: float


AdapterLayers = Mapping[str, tuple[LowRank, ...]]
"""An adapter's updates by layer name: the name of a `Linear` or `GatedLinear`, or for a shared
expert the mixture's name with ".shared.gate_up" or ".shared.down" appended."""
MAX_RANK = 256
"""The largest rank of a `LowRank`."""


class PackedAdapter:
    """The result of `AdapterSlots.pack`, valid for the same program only."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixExperts:
    """Sets ``out`` to the weighted sum of the outputs of each token's experts and of the shared
    expert.

    If the experts are split over ranks by their inner channels (``is_split``), each output is
    summed over the ranks before it is weighted, so that the result does not depend on their number.
    """

    name: str
    """The mixture's name in the model, such as "layers.3"."""
    router: "Router"
    experts: tuple["Expert", ...]
    shared: "Expert | None"
    bias_EC: Tensor | None
    """Bias of each expert's last product, float32, added after the sum over the ranks."""
    is_split: bool
    x: Value
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RotateAndWrite:
    """Sets ``out`` to the rotated Q of ``x``, the heads of Q, K and V. The rotated K and V are
    written to the cache.

    If there are ``q_norm`` and ``k_norm``, each head of Q and K is normalised before it is rotated.
    If they are longer than a head, there is one norm over all heads of Q, and one over those of K.
    """

    kv: int
    """The index of the cache."""
    num_heads: int
    """The query heads of this rank."""
    num_kv_heads: int
    head_size: int
    table: RotaryTable
    x: Value
    out: Value
    options: AttentionOptions = PLAIN
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None
    eps: float = 0.0
    """The ``eps`` of both norms, which also share ``kind``."""
    kind: NormKind = "rms"
    q_scale_P: Tensor | None = None
    """A factor on Q for each position."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attend:
    """Sets ``out`` to the causal attention of the heads ``x`` over the cache."""

    kv: int
    scale: float
    x: Value
    out: Value
    options: AttentionOptions = PLAIN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllReduce:
    """Sums ``x`` over all ranks and adds the bias of the layer whose product it is."""

    x: Value
    bias_C: Tensor | None = None
    """Added before the sum is rounded, so that bits do not depend on the number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Add:
    """Adds ``scale`` times ``x`` to ``to``."""

    x: Value
    to: Value
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AddNorm:
    """`Add`, then sets ``out`` to the RMS norm of the sum."""

    weight_C: Tensor
    eps: float
    x: Value
    to: Value
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gather:
    """Reduces ``x`` to its sampled rows."""

    x: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Logits:
    """The program's result: the logits of ``x`` for this rank's part of the vocabulary."""

    name: str
    layer: LinearLayer
    x: Value
    scale: float = 1.0
    """The factor on the logits."""
    cap: float | None = None
    """Logits become ``cap * tanh(logit / cap)``."""


Op = (
    Embed
    | Norm
    | Linear
    | GatedLinear
    | Activate
    | MixExperts
    | RotateAndWrite
    | Attend
    | AllReduce
    | Add
    | AddNorm
    | Gather
    | Logits
)
Program = tuple[Op, ...]


class AdapterSlots(Protocol):
    """The slots of a program's adapters, which batches select by number."""

    def open(self, *, num_slots: int, max_rank: int) -> None:
        """Allocates the slots, once, before the first step. Empty slots have no effect.

        ``max_rank``: the largest rank of any `LowRank`, up to `MAX_RANK`.
        """

    def pack(self, layers: AdapterLayers) -> PackedAdapter:
        """Prepares an adapter so that `set` is fast. The result can be kept and set in any slot.

        Raises:
            ValueError: There is no such layer, or the adapter's rank, type or shape does not fit
                its layer.
        """

    def set(self, slot: int, adapter: AdapterLayers | PackedAdapter | None) -> None:
        """Puts an adapter into a slot, packing it if necessary, or empties the slot. Must not be
        called while a step runs.

        Raises:
            ValueError: There is no such slot, or as `pack`. The slot is unchanged.
        """


class ProgramRunner(Protocol):
    """A program, ready to run on one rank."""

    @property
    def chooses(self) -> bool:
        """Whether `forward` supports ``greatest_G2`` and ``wanted``."""

    @property
    def adapters(self) -> "AdapterSlots | None":
        """The adapter slots; ``None`` if adapters are not supported."""

    def forward(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        all_reduce: Callable[[Tensor], Tensor],
        greatest_G2: Tensor | None = None,
        edits: GreedyEdits | None = None,
        wanted: WantedColumns | None = None,
    ) -> Tensor:
        """Computes the step's tokens, writes their KV, and sets ``batch.hidden``.

        ``all_reduce`` sums a tensor over the ranks, in place. Returns this rank's part of the
        logits ``[S, V]``: float32 on a CPU, else of the model's type. Logits of the last G rows are
        not returned: their greatest one and its column, the first among equals, are stored in
        ``greatest_G2`` (float32), after ``edits`` were applied. Columns that are not ``wanted`` are
        undefined.
        """
