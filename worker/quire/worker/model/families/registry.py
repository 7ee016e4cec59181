"""The model families by the architecture name in ``config.json``."""

from collections.abc import Callable

from quire.worker.model.families.cohere import cohere, cohere2
from quire.worker.model.families.gemma import gemma2, gemma3
from quire.worker.model.families.glm import glm, glm4
from quire.worker.model.families.granite import granite, granite_hybrid, granite_swa
from quire.worker.model.families.llama import llama, ministral, ministral3, mistral, smollm3
from quire.worker.model.families.moe import (
    glm4_moe,
    gpt_oss,
    granite_moe,
    granite_moe_swa,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_vl_moe,
)
from quire.worker.model.families.olmo import olmo2, olmo3
from quire.worker.model.families.phi import phi3
from quire.worker.model.families.qwen import qwen2, qwen3
from quire.worker.model.families.starcoder import starcoder2
from quire.worker.model.spec import ModelSpec
from quire.worker.weights.fields import Fields

FAMILIES: dict[str, Callable[[Fields], ModelSpec]] = {
    "Cohere2ForCausalLM": cohere2,
    "CohereForCausalLM": cohere,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Glm4ForCausalLM": glm4,
    "Glm4MoeForCausalLM": glm4_moe,
    "GlmForCausalLM": glm,
    "GptOssForCausalLM": gpt_oss,
    "GraniteForCausalLM": granite,
    "GraniteMoeForCausalLM": granite_moe,
    "GraniteMoeHybridForCausalLM": granite_hybrid,
    "GraniteMoeSWAForCausalLM": granite_moe_swa,
    "GraniteSWAForCausalLM": granite_swa,
    "LlamaForCausalLM": llama,
    "MiMoForCausalLM": qwen2,
    "Ministral3ForCausalLM": ministral3,
    "MinistralForCausalLM": ministral,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "Olmo3ForCausalLM": olmo3,
    "OlmoeForCausalLM": olmoe,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Qwen3VLMoeTextForCausalLM": qwen3_vl_moe,
    "SmolLM3ForCausalLM": smollm3,
    "Starcoder2ForCausalLM": starcoder2,
}
