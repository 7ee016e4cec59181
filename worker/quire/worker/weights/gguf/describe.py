"""Maps a GGUF file's metadata to the ``config.json`` of the checkpoint that it was made from, from
which `quire.worker.model.families` describes the model. Does not import torch.

Values that llama.cpp derives from a model's architecture are written out here. An unknown field of
the architecture is refused, because it may change what is computed.
"""

import math
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.fields import Fields
from quire.worker.weights.gguf.container import Header, Strings

_F32 = 0
CONTROL, USER_DEFINED = 3, 4
"""GGUF's token types for tokens that are not text, and for those that are matched as a whole."""

_READ = {
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count"),
    *("rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
_CAUSAL = "attention.causal"
_IGNORED = {_CAUSAL, "rope.scaling.finetuned", "tensor_data_layout"}
ENDS = {
    *("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|end|>", "<end_of_turn>", "<EOT>", "[EOT]", "<end_of_utterance>"),
}
"""Tokens that end a text or a turn, of which files name only one."""

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192
"""Llama 3's context before it was extended, which files lack: they only have frequency factors."""


class _Metadata:
    """The fields of a header's architecture, and the names of those that are ``known``."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.prefix = f"{header.architecture}."
        self.known = _READ | _IGNORED

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value; a single one if the file repeats it for each layer."""
        value = self.header.metadata.get(self.prefix + name, default)
        if isinstance(value, array):
            if len(set(value)) != 1:
                raise self.refused(name, "layers that differ are not supported")
            return value[0]
        return value

    def count(self, name: str, *, default: int | None = None) -> int:
        return self._fields(name).count(self.prefix + name, default=default)

    def number(self, name: str, *, default: float) -> float:
        return self._fields(name).number(self.prefix + name, default=default)

    def _fields(self, name: str) -> Fields:
        return Fields({self.prefix + name: self.get(name)}, self.header.file)

    def refused(self, name: str, why: str) -> CheckpointError:
        value = self.header.metadata.get(self.prefix + name)
        return CheckpointError(f"{self.header.file}: {self.prefix}{name}={value!r}: {why}")

    def check_known(self) -> None:
        """Raises CheckpointError: a field is set that is not known."""
        for key, value in self.header.metadata.items():
            name = key.removeprefix(self.prefix)
            if key == self.prefix + _CAUSAL and value is False:
                raise self.refused(
                    name, "only models in which a token sees those before it are read"
                )
            if name != key and name not in self.known and value not in (0, False):
                raise self.refused(
                    name, "it is not known what that changes; serve the model's safetensors files"
                )


def describe(header: Header) -> dict[str, Any]:
    """The fields of the ``config.json``.

    Raises:
        CheckpointError: The architecture is not one of `ARCHITECTURES`, or a field is missing,
            wrong or unknown.
    """
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.file}: GGUF files of architecture {architecture!r} are not supported; "
            f"supported: {', '.join(ARCHITECTURES)}; serve the model's safetensors files"
        )
    metadata = _Metadata(header)
    config = _shared(metadata)
    config |= ARCHITECTURES[architecture](metadata, config)
    metadata.check_known()
    return config


def end_token_ids(header: Header) -> list[int]:
    """The tokens that end texts: the file's own, and those that llama.cpp treats as such."""
    keys = ("eos", "eot", "eom")
    found = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Strings):
        types = header.metadata.get("tokenizer.ggml.token_type", ())
        found += [
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens.read(), types, strict=False))
            if kind in (CONTROL, USER_DEFINED) and token in ENDS
        ]
    return list(dict.fromkeys(token_id for token_id in found if isinstance(token_id, int)))


def _shared(metadata: _Metadata) -> dict[str, Any]:
    """The fields that all architectures have."""
    header = metadata.header
    num_heads = metadata.count("attention.head_count")
    hidden_size = metadata.count("embedding_length")
    head_size = metadata.count("attention.key_length", default=max(1, hidden_size // num_heads))
    if metadata.count("attention.value_length", default=head_size) != head_size:
        raise metadata.refused("attention.value_length", f"it must be that of keys, {head_size}")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(
            f"{header.file}: has no tensor token_embd.weight: it is a vocabulary, an adapter or a "
            "projector, and no model"
        )
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": metadata.count("block_count"),
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", default=num_heads),
        "head_dim": head_size,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", default=1e-6),
        "rope_parameters": _rope(metadata, head_size),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32" if _is_float32(header) else "bfloat16",
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(header) or None,
    }


def _is_float32(header: Header) -> bool:
    return all(tensor.type == _F32 for tensor in header.tensors.values())


def _rope(metadata: _Metadata, head_size: int) -> dict[str, Any]:
    theta = metadata.number("rope.freq_base", default=10_000.0)
    size = metadata.count("rope.dimension_count", default=head_size)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if size != head_size:
        rope["partial_rotary_factor"] = size / head_size
    factor = metadata.get("rope.scaling.factor")
    original = metadata.get("rope.scaling.original_context_length")
    by_factor = metadata.get("rope.scaling.attn_factor")
    quotients = _floats(metadata.header, "rope_freqs.weight")
    long, short = (
        _floats(metadata.header, f"rope_factors_{each}.weight") for each in ("long", "short")
    )
    match metadata.get("rope.scaling.type", "none"):
        case _ if quotients is not None:
            return rope | _by_quotients(quotients, theta=theta, size=size)
        case _ if long is not None and short is not None:
            return rope | {
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "original_max_position_embeddings": original,
                "attention_factor": by_factor,
            }
        case "none" | "longrope":
            return rope
        case "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        case "yarn" if by_factor in (None, 1.0):
            return rope | {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original,
                "beta_fast": metadata.get("rope.scaling.yarn_beta_fast"),
                "beta_slow": metadata.get("rope.scaling.yarn_beta_slow"),
            }
    raise metadata.refused("rope.scaling.type", f"not supported with {by_factor=}")


def _by_quotients(quotients: list[float], *, theta: float, size: int) -> dict[str, Any]:
    """Llama 3's RoPE parameters if they give these frequency factors, so that outputs have the bits
    of the safetensors checkpoint; otherwise the factors themselves."""
    factor = max(quotients)
    low, high = _LLAMA3.values()
    expected = []
    for channel in range(0, size, 2):
        turns = _LLAMA3_POSITIONS / (2 * math.pi * theta ** (channel / size))
        blend = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / ((1 - blend) / factor + blend))
    pairs = list(zip(quotients, expected, strict=False))
    if 2 * len(quotients) == size and all(math.isclose(*each, rel_tol=1e-4) for each in pairs):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "original_max_position_embeddings": _LLAMA3_POSITIONS,
            **_LLAMA3,
        }
    return {
        "rope_type": "longrope",
        "short_factor": quotients,
        "long_factor": quotients,
        "attention_factor": 1.0,
    }


def _floats(header: Header, name: str) -> list[float] | None:
    """A small tensor that is part of the description.

    Raises:
        CheckpointError: It is not float32, or not complete.
    """
    tensor = header.tensors.get(name)
    if tensor is None:
        return None
    count = tensor.shape[-1]
    if tensor.type != _F32 or len(tensor.shape) != 1 or not 1 <= count <= 1 << 16:
        raise CheckpointError(f"{header.file}: tensor {name!r} must be a row of float32")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        content = stream.read(4 * count)
    if len(content) < 4 * count:
        raise CheckpointError(f"{tensor.file}: ends within tensor {name!r}: get it again")
    values = array("f", content).tolist()
    return list(Fields({name: values}, header.file).numbers(name, count=count))


def _llama(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.known |= {"expert_count", "expert_used_count"}
    if metadata.get("expert_count"):
        return {
            "architectures": ["MixtralForCausalLM"],
            "num_local_experts": metadata.count("expert_count"),
            "num_experts_per_tok": metadata.count("expert_used_count"),
            "sliding_window": None,
        }
    has_bias = "blk.0.attn_q.bias" in metadata.header.tensors
    return {"architectures": ["LlamaForCausalLM"], "attention_bias": has_bias}


def _smollm3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": ["SmolLM3ForCausalLM"]}  # Every fourth layer has no positions.


def _qwen2(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"]}


def _qwen3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"]}


def _qwen3_moe(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.known |= {"expert_count", "expert_used_count", "expert_feed_forward_length"}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "moe_intermediate_size": metadata.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _phi3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.known |= {"attention.sliding_window"}
    window = metadata.get("attention.sliding_window") or None
    return {
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": window,
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length"),
    }


def _gemma(metadata: _Metadata, config: Mapping[str, Any], *, largest: int) -> dict[str, Any]:
    """Gemma's fields. ``largest``: the number of layers of the only model size whose queries are
    scaled by the embedding size per head rather than the head size."""
    metadata.known |= {"attention.sliding_window", "attn_logit_softcapping"}
    metadata.known |= {"final_logit_softcapping"}
    scale = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        scale = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
        "sliding_window": metadata.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }


def _gemma2(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    fields = _gemma(metadata, config, largest=46)
    for name, value in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        fields[name] = metadata.get(name, value)
    return {"architectures": ["Gemma2ForCausalLM"], **fields}


def _gemma3(metadata: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.known |= {"rope.freq_base_swa", "attention.sliding_window_pattern"}
    fields = _gemma(metadata, config, largest=62)
    if not metadata.get("attention.sliding_window"):
        raise metadata.refused(
            "attention.sliding_window", "Gemma 3 without windows is not supported"
        )
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window_pattern": metadata.get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10_000.0),
        **fields,
    }


ARCHITECTURES: dict[str, Callable[[_Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "smollm3": _smollm3,
}
