"""Extracts the text decoder of multimodal models, which answers text requests like the whole model.

It also fills in the defaults of fields that a configuration leaves out.
"""

from typing import Any

from quire.worker.weights.fields import Fields

_SERVED = (
    *("Gemma3", "InternVL", "KimiK25", "Kimi_K25", "Llava", "LlavaNext", "LlavaOnevision"),
    *("Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"),
)
"""Models whose text decoder gives the same outputs without the other parts, which tests compare.
Cohere's are not included: in transformers their logits have another scale."""
_REFUSED = ("Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Models whose text decoder is refused for a reason of its own."""
_ENDING = "ForConditionalGeneration"
_TEXT = {
    **{"llama": "Llama", "mistral": "Mistral", "ministral3": "Ministral3", "qwen2": "Qwen2"},
    **{"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"},
    **{"gemma3_text": "Gemma3", "gemma4_text": "Gemma4", "llama4_text": "Llama4"},
    **{"qwen2_vl_text": "Qwen2", "qwen2_5_vl_text": "Qwen2", "qwen3_vl_text": "Qwen3"},
    **{"qwen3_vl_moe_text": "Qwen3VLMoeText", "qwen3_5_text": "Qwen3_5"},
    **{"qwen3_5_moe_text": "Qwen3_5Moe", "kimi_k2": "DeepseekV3", "deepseek_v3": "DeepseekV3"},
    **{"qwen2_vl": "Qwen2", "qwen2_5_vl": "Qwen2"},
}
"""The decoder for each type of text part. The last two occur in files without ``text_config``."""
_THETA = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"), 1_000_000.0),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), 500_000.0),
}
"""Defaults of ``rope_theta``; other types use their decoder's default."""
_INHERITED = (
    *("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config"),
    "tie_word_embeddings",
)
_GEMMA3 = {
    **{"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_hidden_layers": 26, "num_attention_heads": 8, "max_position_embeddings": 131_072},
}
_LLAMA = {
    **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048},
}
_MISTRAL = _LLAMA | {"intermediate_size": 14_336, "max_position_embeddings": 4096 * 32}
_DEFAULTS: dict[str, dict[str, int]] = {
    "Gemma3ForCausalLM": _GEMMA3,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
}
"""transformers' defaults, on which old files rely to leave out most of ``text_config``."""
_KV_HEADS = {
    **{"Gemma2": 4, "Gemma3": 4, "Glm": 2, "Glm4": 2, "Glm4Moe": 8, "GptOss": 8, "Ministral3": 8},
    **{"Ministral": 8, "Mistral": 8, "Mixtral": 8, "Qwen2": 32, "Qwen2Moe": 16, "Qwen3": 32},
    **{"Qwen3Moe": 4, "SmolLM3": 4, "Starcoder2": 2},
}
"""Default number of KV heads if the field is missing. If it is null, and in other families, there
are as many as query heads."""


def architecture_of(config: Fields) -> str:
    """The first architecture that is named, or else the model's type."""
    return [*config.names("architectures"), str(config.raw.get("model_type", "unknown"))][0]


def text_part(config: Fields) -> Fields | None:
    """The text decoder's configuration; ``None`` if the model is not known to be multimodal.

    Raises:
        CheckpointError: The model is multimodal, and its text part is not supported.
    """
    name, raw = architecture_of(config), config.raw
    if not name.endswith(_ENDING) or config.flag("is_encoder_decoder"):
        return None
    text = config.section("text_config").raw
    if name.removesuffix(_ENDING) not in (*_SERVED, *_REFUSED):
        raise config.broken(
            f"architecture {name!r} is not supported: it is more than a decoder of text; text "
            f"parts are served of {', '.join(f'{each}{_ENDING}' for each in _SERVED)}"
        )
    inherited = {key: raw[key] for key in _INHERITED if raw.get(key) is not None}
    if text:
        first = {"tie_word_embeddings": inherited.pop("tie_word_embeddings", None)}
        given = {key: value for key, value in text.items() if value is not None}
        text = inherited | given | {key: v for key, v in first.items() if v is not None}
    else:
        text = {key: value for key, value in raw.items() if key != "vision_config"}
    kind = text.get("model_type", "llama" if name == f"Llava{_ENDING}" else None)
    if kind not in _TEXT:
        raise config.broken(
            f"{name} has text_config.model_type={kind!r}, whose decoder is not known; one of "
            f"{', '.join(_TEXT)}"
        )
    if kind in _THETA and not (text.get("rope_parameters") or {}).get("rope_theta"):
        text["rope_theta"] = text.get("rope_theta") or _THETA[kind]
    for section in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(section), dict):
            text[section] = _of_text(text[section])
    return Fields(text | {"architectures": [f"{_TEXT[kind]}ForCausalLM"]}, config.file)


def with_defaults(config: Fields, *, is_text_part: bool) -> Fields:
    """The configuration with the defaults of transformers' classes for fields that are absent."""
    architecture = architecture_of(config)
    defaults: dict[str, Any] = dict(_DEFAULTS.get(architecture, {})) if is_text_part else {}
    name = architecture.removesuffix("ForCausalLM")
    if name in _KV_HEADS:
        defaults["num_key_value_heads"] = _KV_HEADS[name]
    return Fields(defaults | config.raw, config.file)


def _of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """Reduces multimodal RoPE to RoPE: time, height and width of a text are one position."""
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in rope.items()}
