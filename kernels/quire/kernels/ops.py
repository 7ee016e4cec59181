"""The operations of a forward pass. A program is a list of them, with their weights.

They compute on values that have names. A value is ``[T, channels]``; once it was gathered it is
``[S, channels]``. `quire.kernels.loop` says in plain Python what each operation does; a backend
may run a program in another way, with the same meaning, and may first put several operations
together (`quire.kernels.rewrites`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.batch import Batch, GreedyEdits, WantedColumns

if TYPE_CHECKING:  # They are made of what is here.
    from quire.kernels.experts import Expert, Router

# T tokens of the step, packed   B sequences   M blocks of the longest   S rows that are sampled
# G of these that are greedy
# C hidden size   K KV heads (of this rank)   D head size   R half of the rotated channels
# E experts   V vocabulary   P positions   I, O a linear layer's input and output
# R an adapter's rank (of `LowRank`)

KvCache = list[tuple[Tensor, Tensor]]
"""K and V of each layer: ``[num_blocks, block_size, K, D]``, in int8 with `SCALE_BYTES` more behind
the D. What stands where within a block is the backend's affair."""

Value = Literal["residual", "normed", "qkv", "queries", "attended", "hidden", "branch"]
NormKind = Literal["rms", "wide", "layer"]
""""wide" is an RMS norm that is rounded after its product with the weights, which are float32,
rather than before; "layer" subtracts the mean, and is rounded like it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clamped:
    """gpt-oss' ``(up + 1) * gate * sigmoid(alpha * gate)``, of gates up to ``limit`` and ups within
    it on both sides."""

    alpha: float
    limit: float


GateActivation = Literal["silu", "gelu_tanh"] | Clamped
SharedExpert = Literal["none", "plain", "gated"]
"""Whether all tokens go to one more expert, and whether its share is the sigmoid of a score."""


class LinearLayer(Protocol):
    """Weights, laid out as a backend likes them: ``[T, I]`` to ``[T, O]``. A row's bits do not
    depend on the other rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix: outputs (a gated layer's gates and ups) and inputs."""

    def __call__(self, x_TI: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """Cosines and sines of every position, float32."""

    cos_PR: Tensor
    sin_PR: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embed:
    """``out``: the tokens' rows of the embedding."""

    weight_VC: Tensor
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Norm:
    """``out``: the norm of ``x``."""

    weight_C: Tensor
    eps: float
    x: Value
    out: Value
    kind: NormKind = "rms"
    bias_C: Tensor | None = None
    """Only a norm of kind "layer" has one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linear:
    """``out``: the layer's product with ``x``. The batch says which adapters its rows use."""

    name: str
    """The layer's place in the model, such as "layers.3.qkv"."""
    layer: LinearLayer
    x: Value
    out: Value
    adds: bool = False
    """Onto what ``out`` was."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatedLinear:
    """``activation(gate) * up``, or as `Clamped` says, where the layer's product with ``x`` is
    gates, then ups."""

    name: str
    layer: LinearLayer
    """From `pack_gated_linear`: it does all of that."""
    x: Value
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Activate:
    """``x``: its GELU, by the formula with tanh."""

    x: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRank:
    """An adapter's addition to some outputs of one linear layer: ``scale * B (A x)``.

    `quire.kernels.low_rank` says what is rounded where.
    """

    a_RI: Tensor
    """The columns of this rank's inputs. A and B have the model's type."""
    b_OR: Tensor
    """This rank's outputs, in the layer's order: heads of Q and K are reordered as the layer's
    are."""
    first_row: int
    """The first of the layer's outputs on this rank that it adds to: qkv is Q, K and V; gate_up is
    gates, then ups."""
    scale: float


AdapterLayers = Mapping[str, tuple[LowRank, ...]]
"""What an adapter adds, by the layers' names: those of `Linear` and `GatedLinear`, and of a
mixture's shared expert the mixture's name with ".shared.gate_up" or ".shared.down" behind it."""
MAX_RANK = 256
"""The greatest rank of one `LowRank`."""


class PackedAdapter:
    """What `AdapterSlots.pack` makes, for the same program only."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixExperts:
    """``out``: the weighted sum of what the experts of each token, and the shared one, make of
    ``x``.

    Where they are ``is_split``, by their inner channels, each of the terms is summed over all ranks
    before it is weighted, so that the result does not depend on their number.
    """

    name: str
    """The mixture's place in the model, such as "layers.3"."""
    router: "Router"
    experts: tuple["Expert", ...]
    shared: "Expert | None"
    bias_EC: Tensor | None
    """The bias of each expert's last product, float32, added once the ranks' shares are summed."""
    is_split: bool
    x: Value
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RotateAndWrite:
    """``out``: Q, rotated, of ``x``, the heads of Q, K and V. K, rotated, and V go to the cache.

    Where there are ``q_norm`` and ``k_norm``, each head of Q and K gets its norm before it is
    rotated; where they are longer than a head, all heads of Q get one norm, and so do those of K.
    """

    kv: int
    """Which of the caches."""
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
    """Both norms have this ``eps`` and this ``kind``."""
    kind: NormKind = "rms"
    q_scale_P: Tensor | None = None
    """By which Q is multiplied, at each position."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Attend:
    """``out``: causal attention of the heads ``x`` over the cache."""

    kv: int
    scale: float
    x: Value
    out: Value
    options: AttentionOptions = PLAIN


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllReduce:
    """``x``: its sum over all ranks, and the bias of the layer that it is a product of."""

    x: Value
    bias_C: Tensor | None = None
    """Added before the sum is rounded, so that a bias changes no bits with the number of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Add:
    """``to``: itself and ``scale`` times ``x``."""

    x: Value
    to: Value
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AddNorm:
    """`Add`, and then ``out``: the RMS norm of the sum."""

    weight_C: Tensor
    eps: float
    x: Value
    to: Value
    out: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Gather:
    """``x``: its rows that are sampled."""

    x: Value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Logits:
    """The program's result: this rank's part of the vocabulary, of the rows ``x``."""

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
    """The adapters that a program's batches may name, by the numbers of their slots."""

    def open(self, *, num_slots: int, max_rank: int) -> None:
        """Makes room, once, before the first step; all slots are empty, and add nothing.

        ``max_rank``: of any one `LowRank`, up to `MAX_RANK`.
        """

    def pack(self, layers: AdapterLayers) -> PackedAdapter:
        """An adapter as `set` needs it, which does the rest in no time: to be kept, and set in any
        slots.

        Raises:
            ValueError: There is no such layer, or a layer cannot have the adapter (its rank, type
                or shape).
        """

    def set(self, slot: int, adapter: AdapterLayers | PackedAdapter | None) -> None:
        """Puts an adapter into a slot, packs it first if need be, or empties the slot. Not while a
        step runs.

        Raises:
            ValueError: There is no such slot, or as `pack`. The slot is as it was.
        """


class ProgramRunner(Protocol):
    """A program, ready to run on one rank."""

    @property
    def chooses(self) -> bool:
        """Whether it takes ``greatest_G2`` and ``wanted``."""

    @property
    def adapters(self) -> "AdapterSlots | None":
        """``None`` where it cannot have any."""

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
        """Computes the step's tokens and writes their KV. Fills in ``batch.hidden``.

        ``all_reduce`` sums a tensor over the ranks, in place. Returns this rank's part of the
        logits ``[S, V]``: float32 on a CPU, else of the model's type. But of the last G rows the
        logits are not kept: the greatest one and its column, the first of equals, are put into
        ``greatest_G2`` (float32). ``edits`` change these rows' logits first. Of columns that are
        not ``wanted`` nothing is kept, or anything.
        """
