"""The shape of a model, read from a checkpoint's ``config.json`` and checked.

Knows no torch, so that a gateway can use it. Both ways of writing the rotary embedding are read:
``rope_theta`` + ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.worker.checkpoint import read_json
from quire.worker.config import EngineConfig
from quire.worker.errors import CheckpointError, ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")
ROPE_TYPES = ("default", "linear", "llama3")
_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """The rotary position embedding."""

    theta: float
    rope_type: str
    """"default", "linear" (Chen et al. 2023) or "llama3" (Llama 3.1's)."""
    factor: float = 1.0
    """By how much the context was stretched: "linear" and "llama3"."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    """The context before it was stretched: "llama3", as are the two factors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The shape of a Llama model, or of a Mistral one: a Llama whose layers may have a window."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Query head h reads KV head ``h // (num_heads // num_kv_heads)``."""
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    """The LM head is the embedding."""
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    """In which the checkpoint wants to be computed."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sliding_window: int | None = None
    """Tokens that each query sees at most, itself the last; ``None`` is all."""


def read_model_config(path: Path) -> LlamaConfig:
    """Reads ``config.json`` (and the end tokens of ``generation_config.json``) in ``path``.

    Raises:
        CheckpointError: Missing, damaged, or a model of a kind that Quire does not run.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory; model must be a checkpoint directory{_where_from(path)}"
        )
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: has no config.json; is it a Hugging Face checkpoint?")
    raw = read_json(file)
    architectures = raw.get("architectures") or [raw.get("model_type", "unknown")]
    if architectures[0] not in ARCHITECTURES:
        raise CheckpointError(
            f"{file}: architecture {architectures[0]!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    try:
        config = _llama_config(raw, file, eos_token_ids=_eos_token_ids(path, raw))
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: {error}") from error
    _check_shape(config, file)
    return config


def resolve_dtype(config: EngineConfig, model: LlamaConfig) -> str:
    """The type of weights, activations and KV: "float32", "bfloat16" or "float16"."""
    return model.dtype if config.dtype == "auto" else config.dtype


def resolve_max_model_len(config: EngineConfig, model: LlamaConfig) -> int:
    """The longest prompt + output.

    Raises:
        ConfigError: More was asked for than the checkpoint was trained for.
    """
    trained = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len={config.max_model_len}: the checkpoint was trained for {trained} "
            f"positions; set at most {trained}"
        )
    return config.max_model_len or trained


def check_parallel(model: LlamaConfig, tensor_parallel_size: int) -> None:
    """Checks that the heads can be shared among ``tensor_parallel_size`` ranks.

    Query heads must divide. KV heads divide too, or each is replicated on as many ranks.

    Raises:
        ConfigError: They cannot; the message says which sizes can.
    """
    if _divides(model, tensor_parallel_size):
        return
    sizes = [size for size in range(1, model.num_heads + 1) if _divides(model, size)]
    raise ConfigError(
        f"tensor_parallel_size={tensor_parallel_size}: cannot share {model.num_heads} attention "
        f"heads and {model.num_kv_heads} KV heads; possible: {', '.join(map(str, sizes))}"
    )


def _divides(model: LlamaConfig, size: int) -> bool:
    kv_heads = model.num_kv_heads
    return model.num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _llama_config(
    raw: dict[str, Any], file: Path, *, eos_token_ids: tuple[int, ...]
) -> LlamaConfig:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(f"{file}: quantized weights ({method!r}) are not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{file}: hidden_act={activation!r} is not supported; only 'silu' is")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: dtype={dtype!r} is not supported; one of {DTYPES}")
    hidden_size = _int(raw, "hidden_size", file)
    num_heads = _int(raw, "num_attention_heads", file)
    max_positions = _int(raw, "max_position_embeddings", file)
    bos = raw.get("bos_token_id")
    return LlamaConfig(
        vocab_size=_int(raw, "vocab_size", file),
        hidden_size=hidden_size,
        intermediate_size=_int(raw, "intermediate_size", file),
        num_layers=_int(raw, "num_hidden_layers", file),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_size=int(raw.get("head_dim") or hidden_size // num_heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_positions,
        rope=_rope_config(raw, file, max_positions=max_positions),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        dtype=dtype,
        bos_token_id=None if bos is None else int(bos),
        eos_token_ids=eos_token_ids,
        sliding_window=_sliding_window(raw, file),
    )


def _sliding_window(raw: dict[str, Any], file: Path) -> int | None:
    """Of Mistral's configurations: null is none, and a file that does not say means 4096."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if raw.get(name) is not None:
            raise CheckpointError(f"{file}: {name}={raw[name]!r} is not supported")
    if (raw.get("architectures") or [None])[0] != "MistralForCausalLM":
        return None
    if len(set(raw.get("layer_types") or ())) > 1:
        raise CheckpointError(
            f"{file}: layer_types={sorted(set(raw['layer_types']))} in one model are not supported"
        )
    if raw.get("sliding_window", _MISTRAL_WINDOW) is None:
        return None
    return _int({"sliding_window": _MISTRAL_WINDOW, **raw}, "sliding_window", file)


def _rope_config(raw: dict[str, Any], file: Path, *, max_positions: int) -> RopeConfig:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"{file}: rope_type={rope_type!r} is not supported; one of {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointError(f"{file}: partial_rotary_factor other than 1 is not supported")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if rope_type == "default":
        return RopeConfig(theta=theta, rope_type=rope_type)
    required = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
    missing = [name for name in required[rope_type] if name not in rope]
    if missing:
        raise CheckpointError(f"{file}: rope_type={rope_type!r} lacks {', '.join(missing)}")
    return RopeConfig(
        theta=theta,
        rope_type=rope_type,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(
            rope.get("original_max_position_embeddings") or max_positions
        ),
    )


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """Of ``generation_config.json`` where it says so, as chat models end turns by its list."""
    eos = raw.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.is_file():
        from_generation = read_json(generation).get("eos_token_id")
        eos = eos if from_generation is None else from_generation
    if eos is None:
        return ()
    return tuple(int(token) for token in eos) if isinstance(eos, list) else (int(eos),)


def _where_from(path: Path) -> str:
    """What to do about a name that other servers would look up."""
    if path.is_absolute() or len(path.parts) != 2:
        return ""
    return f"; to fetch a repository of that name: hf download {path} --local-dir {path.name}"


def _int(raw: dict[str, Any], name: str, file: Path) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {name}={value!r} must be an integer of 1 or more")
    return value


def _check_shape(config: LlamaConfig, file: Path) -> None:
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{file}: {config.num_heads} attention heads are no multiple of "
            f"{config.num_kv_heads} KV heads"
        )
    if config.head_size < 2 or config.head_size % 2:
        raise CheckpointError(f"{file}: head size {config.head_size} must be even")
