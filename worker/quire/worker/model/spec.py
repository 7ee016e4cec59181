"""A model as a description: what its layers are made of, not how that is computed.

Knows no torch, so that a gateway can use it. Each field is one that a program is made of; values
and combinations that no backend runs are refused by `quire.worker.model.support`.
"""

from dataclasses import dataclass, field
from typing import Literal

from quire.worker.model.pooling import Pooling
from quire.worker.model.stored_weights import StoredWeights

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
NormPlace = Literal["attention_in", "attention_out", "mlp_in", "mlp_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One table of rotary position embeddings."""

    size: int
    """Channels of a head that are rotated: the first ones."""
    theta: float
    kind: Literal["default", "linear", "llama3", "dynamic", "yarn", "longrope"] = "default"
    """"linear" is Chen et al. 2023, "llama3" Llama 3.1's; the others are transformers'."""
    factor: float = 1.0
    """The factor by which the context was stretched, for all kinds but "default"."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    """The context before it was stretched: "llama3", as are the two factors, and later kinds."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Channels between ``beta_fast`` and ``beta_slow`` are whole ones: "yarn", as are these."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines: "yarn" and "longrope"."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """One per pair of channels: "longrope". A sequence that may outgrow ``original_max_positions``
    has the long ones from its start."""
    interleaved: bool = False
    """Channel 2 i turns with 2 i + 1, rather than i with i + size / 2."""


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
    """Which of `ModelSpec.ropes`; ``None`` is no position."""
    window: int | None = None
    """Tokens that each query sees at most, itself the last; ``None`` is all."""
    lookahead: int = 0
    """Tokens behind itself that each query sees too."""
    score_cap: float | None = None
    sinks: bool = False
    """Each query head has a score that stands for no token."""
    qk_norm: Literal["none", "head", "whole"] = "none"
    """The layer's norm of Q and K before they are rotated: each head's, or all heads' together."""
    qkv_bias: bool = False
    o_bias: bool = False
    position_scale: float = 0.0
    """Queries times ``1 + position_scale * log(1 + floor(position / position_period))``."""
    position_period: int = 0

    @property
    def cached_size(self) -> int:
        """Channels of K, and of V, in the KV cache: K and V of two sizes have the greater one."""
        return max(self.key_size, self.value_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlp:
    size: int
    activation: Activation = "silu"
    gated: bool = True
    """``activation(gate) * up``, rather than ``activation(up)``."""
    bias: bool = False
    alpha: float = 1.0
    """A parameter of "clamped_silu", as is ``limit``."""
    limit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    mlp: Mlp
    """Each expert's."""
    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_after_top_k: bool = False
    correction_bias: bool = False
    """Added to the scores for the choice only."""
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
    """Weights are stored less one."""
    wide: bool = False
    """The product with the weights is rounded, and not what is multiplied: RMS norms."""
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    attention: Attention
    mlp: Mlp | Experts
    norm: Norm
    """The norm in all places."""
    norms: tuple[NormPlace, ...] = ("attention_in", "mlp_in")
    parallel: bool = False
    """Attention and MLP read the same input."""
    residual_scale: float = 1.0
    """The factor on what attention and MLP add to the residual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorNames:
    """What a checkpoint calls a model's tensors, without ``.weight`` and ``.bias``.

    Q, K and V that have one name are one tensor, one below the other, and so are gate and up.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"
    """Before what follows; the braces are the layer's number."""
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
    """Before what follows; the braces are the expert's number. Without them, the matrices of all
    experts are one tensor, and gate and up are one."""
    experts_turned: bool = False
    """That one tensor is ``[E, I, O]``, gates and ups take turns in it, its name ends as given
    here, and its biases' with ``_bias`` (gpt-oss)."""
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared: str = "mlp.shared_experts."
    """Before ``gate_proj``, ``up_proj`` and ``down_proj``."""
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder. Its parts are compared and hashed by value."""

    hidden_size: int
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    final_norm: Norm
    vocab_size: int
    max_positions: int
    """Positions that the model was trained for."""
    tied: bool
    """The LM head is the embedding."""
    dtype: str
    """The type in which the checkpoint wants to be computed."""
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    """Rounded to the type that is computed in."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """Logits become ``logit_cap * tanh(logit / logit_cap)``."""
    names: TensorNames = field(default_factory=TensorNames)
    num_extra_layers: int = 0
    """Layers in the checkpoint behind the last one, which guess further tokens and are not run."""
    is_text_part: bool = False
    """The checkpoint is of a larger model, of which this is the decoder of text."""
    stored: StoredWeights | None = None
    """How the checkpoint has the matrices of linear layers; ``None`` is as they are."""
    through_transformers: str | None = None
    """The configuration, as JSON, of a model that transformers computes. ``layers`` and ``ropes``
    are empty then."""
    has_head: bool = True
    """It can choose a next token. Without, it makes embeddings only."""
    is_encoder: bool = False
    """A text's tokens may see those behind them, so that it is computed as a whole. Has no head."""
    first_position: int = 0
    """The position of a text's first token."""
    pooling: Pooling | None = None
    """How it makes embeddings; ``None`` where it does not."""

    @property
    def is_classifier(self) -> bool:
        """An encoder with a classifier, which scores texts instead."""
        return self.pooling is not None and self.pooling.kind == "classifier"

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Each layer's."""
        return tuple(layer.attention for layer in self.layers)
