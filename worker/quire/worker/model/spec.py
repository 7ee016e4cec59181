"""The description of a model: the parts of its layers, but not how they are computed.

Does not import torch, so that a gateway can use it. `quire.worker.model.program` builds a program
from these fields. `quire.worker.model.support` refuses what no backend can run.
"""

from dataclasses import dataclass, field
from typing import Literal

from quire.worker.model.pooling import Pooling
from quire.worker.weights.stored import StoredWeights

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
NormPlace = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One table of rotary position embeddings."""

    size: int
    """How many channels of a head are rotated: the first ones."""
    theta: float
    kind: Literal["default", "linear", "llama3", "dynamic", "yarn", "longrope"] = "default"
    """Scaling: "linear" as in Chen et al. 2023, "llama3" as in Llama 3.1, else transformers'."""
    factor: float = 1.0
    """The factor by which the context was extended, for all kinds but "default"."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    """The context before it was extended, for "llama3" and the kinds listed after it. The two
    frequency factors are for "llama3"."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the range of channels from ``beta_fast`` to ``beta_slow`` is rounded to integers. All
    three are for "yarn"."""
    attention_factor: float = 1.0
    """The factor on cosines and sines, for "yarn" and "longrope"."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """One factor per pair of channels, for "longrope". A sequence that may exceed
    ``original_max_positions`` uses the long factors from its start."""
    interleaved: bool = False
    """Whether channels 2 i and 2 i + 1 are rotated together, rather than i and i + size / 2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One layer's attention."""

    num_heads: int
    num_kv_heads: int
    """Query head h reads KV head ``h // (num_heads // num_kv_heads)``."""
    key_size: int
    value_size: int
    scale: float
    rope: int | None
    """Index into `ModelSpec.ropes`; ``None`` for a layer without positions."""
    window: int | None = None
    """How many tokens each query attends to, itself the last; ``None`` for all."""
    lookahead: int = 0
    """How many later tokens each query attends to as well."""
    score_cap: float | None = None
    sinks: bool = False
    """Whether each query head has an attention sink: a score that belongs to no token."""
    qk_norm: Literal["none", "head", "whole"] = "none"
    """Whether Q and K are normalised before rotation: per head, or over all heads together."""
    qkv_bias: bool = False
    o_bias: bool = False
    position_scale: float = 0.0
    """Queries are multiplied by
    ``1 + position_scale * log(1 + floor(position / position_period))``."""
    position_period: int = 0

    @property
    def cached_size(self) -> int:
        """Channels of K, and of V, in the KV cache: the greater size, if K and V differ."""
        return max(self.key_size, self.value_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    size: int
    activation: Activation = "silu"
    gated: bool = True
    """Whether the MLP is ``activation(gate) * up`` rather than ``activation(up)``."""
    bias: bool = False
    alpha: float = 1.0
    """A parameter of "clamped_silu"; so is ``limit``."""
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    mlp: Mlp
    """The MLP of each expert."""
    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_top_k: bool = False
    correction_bias: bool = False
    """Whether a bias is added to the scores when experts are chosen, but not when weighted."""
    router_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = False
    scale: float = 1.0
    shared: Mlp | None = None
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    unit_offset: bool = False
    """Whether the checkpoint stores weights minus one."""
    wide: bool = False
    """For RMS norms: whether only the product with the weights is rounded, not its input."""
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    attention: Attention
    mlp: Mlp | Experts
    norm: Norm
    """The norm at each place in ``norms``."""
    norms: tuple[NormPlace, ...] = ("attention_in", "mlp_in")
    parallel: bool = False
    """Whether attention and MLP read the same input."""
    residual_scale: float = 1.0
    """The factor on the outputs of attention and MLP when they are added to the residual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """A checkpoint's names of a model's tensors, without ``.weight`` and ``.bias``.

    If Q, K and V have the same name, they are one tensor, concatenated by rows; so are gate and up.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"
    """Prefix of the names below; the braces are replaced by the layer's number."""
    attention_in: str = "input_layernorm"
    attention_out: str = "post_attention_layernorm"
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = "post_feedforward_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    o: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts.{}."
    """Prefix of an expert's names; the braces are replaced by its number. Without braces, one
    tensor holds the matrices of all experts, and gate and up are one tensor."""
    experts_turned: bool = False
    """Whether the tensor of all experts is ``[E, I, O]`` with gate and up interleaved. Its name has
    no ``.weight``, and its biases' name ends with ``_bias`` (gpt-oss)."""
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared: str = "mlp.shared_experts."
    """Prefix of the shared expert's ``gate_proj``, ``up_proj`` and ``down_proj``."""
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A model. Its parts are compared and hashed by value."""

    hidden_size: int
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    final_norm: Norm
    vocab_size: int
    max_positions: int
    """The number of positions that the model was trained for."""
    tied: bool
    """Whether the LM head shares the weights of the embedding."""
    dtype: str
    """The type of computation that the checkpoint asks for."""
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    """The factor on embeddings, rounded to the type of computation."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits become ``logit_cap * tanh(logit / logit_cap)``."""
    names: TensorNames = field(default_factory=TensorNames)
    num_extra_layers: int = 0
    """Layers in the checkpoint after the last one, for multi-token prediction; they are not run."""
    is_text_part: bool = False
    """Whether this is the text decoder of a larger, multimodal checkpoint."""
    untested: str = ""
    """Why such a text part is refused, if it can be computed; a dry run may give another reason."""
    stored: StoredWeights | None = None
    """How the checkpoint quantises linear layers; ``None`` if it does not."""
    through_transformers: str | None = None
    """The configuration, as JSON, of a model that runs through transformers. In that case
    ``layers`` and ``ropes`` are empty."""
    has_head: bool = True
    """Whether the model has an LM head. Without one it makes embeddings only."""
    is_encoder: bool = False
    """Whether tokens attend to later ones, so that a text is computed as a whole. Has no head."""
    first_position: int = 0
    """The position id of a text's first token. If it is not 0, the token with the id before it is
    padding: such tokens have that position, and later ones count on as if they were not there."""
    pooling: Pooling | None = None
    """How the model makes embeddings; ``None`` if it does not."""

    @property
    def is_classifier(self) -> bool:
        """Whether the model is an encoder with a classifier, which scores texts."""
        return self.pooling is not None and self.pooling.modes == ("classifier",)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The attention of each layer."""
        return tuple(layer.attention for layer in self.layers)
