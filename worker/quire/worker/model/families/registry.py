"""The families by what ``config.json`` calls their architecture."""

from collections.abc import Callable

from quire.worker.model.families.cohere import cohere, cohere2
from quire.worker.model.families.gemma import gemma2, gemma3
from quire.worker.model.families.glm import glm, glm4
from quire.worker.model.families.granite import granite
from quire.worker.model.families.llama import llama, ministral, ministral3, mistral, smollm3
from quire.worker.model.families.olmo import olmo2, olmo3
from quire.worker.model.families.phi import phi3
from quire.worker.model.families.qwen import qwen2, qwen3
from quire.worker.model.families.starcoder import starcoder2
from quire.worker.model.fields import Fields
from quire.worker.model.spec import ModelSpec

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Glm4ForCausalLM": glm4,
    "GlmForCausalLM": glm,
    "GraniteForCausalLM": granite,
    "LlamaForCausalLM": llama,
    "Ministral3ForCausalLM": ministral3,
    "MinistralForCausalLM": ministral,
    "MistralForCausalLM": mistral,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "SmolLM3ForCausalLM": smollm3,
    "Starcoder2ForCausalLM": starcoder2,
}
