"""Extracts the text decoder of multimodal models, which answers text requests like the whole model.

It also fills in the defaults of fields that a configuration leaves out.
"""

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from quire.worker.weights.fields import Fields

_SERVED = (
    *("Gemma3", "InternVL", "KimiK25", "Kimi_K25", "Llava", "LlavaNext", "LlavaOnevision"),
    *("Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"),
)
"""Models whose text decoder gives the same outputs without the other parts, which tests compare.
Cohere's are not included: in transformers their logits have another scale."""
_ENDING = "ForConditionalGeneration"
_TEXT = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_vl", "qwen2_5_vl"), "Qwen2"),
    **{"qwen3_vl_text": "Qwen3", "qwen3_vl_moe_text": "Qwen3VLMoeText", "kimi_k2": "DeepseekV3"},
}
"""The decoder for types of text parts that transformers does not list as decoders. Two types of
Qwen occur in files without ``text_config``."""
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
    **{"GraniteSWA": 4, "Qwen3Moe": 4, "SmolLM3": 4, "Starcoder2": 2},
}
"""Default number of KV heads if the field is missing. If it is null, and in other families, there
are as many as query heads."""
_DECODERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_PAIR = re.compile(r'\("([^"]+)", "([^"]+ForCausalLM)"\)')


def architecture_of(config: Fields) -> str:
    """The first architecture that is named, or else the model's type."""
    return [*config.names("architectures"), str(config.raw.get("model_type", "unknown"))][0]


def text_part(config: Fields) -> Fields | None:
    """The text decoder's configuration; ``None`` if the model is not known to be multimodal.

    Raises:
        CheckpointError: The model is multimodal, and its text part is no decoder of its own.
    """
    name, raw = architecture_of(config), config.raw
    if not name.endswith(_ENDING) or config.flag("is_encoder_decoder"):
        return None
    text = config.section("text_config").raw
    inherited = {key: raw[key] for key in _INHERITED if raw.get(key) is not None}
    if text:
        first = {"tie_word_embeddings": inherited.pop("tie_word_embeddings", None)}
        given = {key: value for key, value in text.items() if value is not None}
        text = inherited | given | {key: v for key, v in first.items() if v is not None}
    else:
        text = {key: value for key, value in raw.items() if key != "vision_config"}
    kind = text.get("model_type", "llama" if name == f"Llava{_ENDING}" else None)
    decoder = f"{_TEXT[kind]}ForCausalLM" if kind in _TEXT else decoder_of(str(kind))
    if decoder is None:
        raise config.broken(
            f"architecture {name!r} is not supported: it is more than a decoder of text, and "
            f"neither Quire nor the installed transformers has its text part (model_type={kind!r}) "
            f"as a decoder; {_served()}"
        )
    if kind in _THETA and not (text.get("rope_parameters") or {}).get("rope_theta"):
        text["rope_theta"] = text.get("rope_theta") or _THETA[kind]
    for section in ("rope_parameters", "rope_scaling"):
        if isinstance(text.get(section), dict):
            text[section] = _of_text(text[section])
    return Fields(text | {"architectures": [decoder]}, config.file)


def untested_wrapper(config: Fields) -> str:
    """Why the text part of a multimodal model is refused even if it can be computed; empty if it
    is known to answer as the whole model does."""
    name = architecture_of(config)
    if name.removesuffix(_ENDING) in _SERVED:
        return ""
    return (
        f"architecture {name!r} is not supported: its text part can be computed, but no test shows "
        f"that it answers alone as the whole model does; {_served()}"
    )


def _served() -> str:
    return f"text parts are served of {', '.join(f'{each}{_ENDING}' for each in _SERVED)}"


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


def may_have(name: str) -> bool:
    """Whether transformers may have a model of this name. Its list is read as text: an import takes
    seconds, and torch. `quire.worker.model.through.classes` has the last word."""
    listed = _models_of_transformers()
    return not listed or f'"{name}"' in listed


def decoder_of(model_type: str) -> str | None:
    """The architecture of the decoders of this type, if transformers lists one."""
    _, _, rest = _models_of_transformers().partition(f"{_DECODERS} =")
    return dict(_PAIR.findall(rest.partition("\n)\n")[0])).get(model_type)


@functools.cache
def _models_of_transformers() -> str:
    """The source of transformers' list of models; empty if it is not where it is expected."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ""
    file = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""
