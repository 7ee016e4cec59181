"""GGUF files give the tokens of transformers' models with the same, dequantised weights."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tests import peft_files
from tests.gguf_files import write_model
from tests.golden.oracle import MAX_TOKENS, config, greedy, model_class, prompts

from quire.llm import LLM, LoRARequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
SHORT, LONG = [1.0, 1.1, 1.3, 1.5], [1.0, 2.0, 4.0, 9.0]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    **{"short_factor": SHORT, "long_factor": LONG},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
WINDOWS = {"sliding_window": 24, "head_dim": 16, "query_pre_attn_scalar": 16}


def llama3_quotients(size: int) -> np.ndarray[Any, Any]:
    """The factors by which llama.cpp's converter divides the rotary frequencies of a head."""
    quotients = []
    for channel in range(0, size, 2):
        wave = 2 * math.pi * 1e4 ** (channel / size)
        smooth = (8192 / wave - 1) / 3
        between = 1 / ((1 - smooth) / 8 + smooth)
        quotients.append(1.0 if wave < 8192 / 4 else 8.0 if wave > 8192 else between)
    return np.array(quotients, np.float32)


class Case(NamedTuple):
    name: str
    """The prefix of the model's classes in transformers."""
    architecture: str
    fields: dict[str, Any] = {}  # noqa: RUF012 - It is not written to.
    metadata: dict[str, Any] = {}  # noqa: RUF012
    tensors: dict[str, Any] = {}  # noqa: RUF012
    kind: Kind = Kind.F32
    settings: dict[str, Any] = {}  # noqa: RUF012
    shortest: int = 1


THETA = {"rope.freq_base": 1e4}
CASES = {
    **{
        f"llama-{kind.name}": Case("Llama", "llama", metadata=THETA, kind=kind)
        for kind in (Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
    },
    "llama-bias": Case("Llama", "llama", {"attention_bias": True}, THETA, kind=Kind.Q8_0),
    "llama-tied": Case("Llama", "llama", {"tie_word_embeddings": True}),
    "llama3": Case(
        "Llama",
        "llama",
        {"rope_parameters": LLAMA3, "head_dim": 64},
        THETA,
        {"rope_freqs.weight": llama3_quotients(64)},
    ),
    "ranks": Case("Llama", "llama", kind=Kind.Q4_0, settings={"tensor_parallel_size": 2}),
    "smollm3": Case("SmolLM3", "smollm3", {"num_hidden_layers": 5}, {"rope.freq_base": 2e6}),
    "qwen2": Case("Qwen2", "qwen2", metadata=THETA, kind=Kind.Q8_0),
    "qwen2-yarn": Case(
        "Qwen2",
        "qwen2",
        {"rope_parameters": YARN},
        {
            **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "rope.scaling.original_context_length": 64,
        },
    ),
    "qwen3": Case("Qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}, kind=Kind.Q5_1),
    "mixtral": Case(
        "Mixtral",
        "llama",
        {"num_local_experts": 4, "sliding_window": None, "head_dim": 16},
        {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6},
        kind=Kind.Q4_0,
    ),
    "qwen3-moe": Case(
        "Qwen3Moe",
        "qwen3moe",
        {
            **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"head_dim": 16, "norm_topk_prob": True},
        },
        {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32},
        kind=Kind.Q8_0,
        settings={"tensor_parallel_size": 2},
    ),
    "phi3": Case(
        "Phi3", "phi3", {"sliding_window": 24}, {"attention.sliding_window": 24}, kind=Kind.Q8_0
    ),
    "phi3-long": Case(
        "Phi3",
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
        {
            **{"rope.dimension_count": 8, "rope.scaling.attn_factor": 1.6**0.5},
            **{"rope.scaling.original_context_length": 32, "attention.sliding_window": 0},
        },
        {
            "rope_factors_long.weight": np.array(LONG, np.float32),
            "rope_factors_short.weight": np.array(SHORT, np.float32),
        },
        shortest=33,
    ),
    "gemma2": Case(
        "Gemma2",
        "gemma2",
        WINDOWS | CAPS | {"num_hidden_layers": 3},
        {"attention.sliding_window": 24, **CAPS},
        kind=Kind.Q8_0,
    ),
    "gemma3": Case(
        "Gemma3",
        "gemma3",
        WINDOWS | {"num_hidden_layers": 7},
        {
            **{"attention.sliding_window": 24, "rope.freq_base": 1e6},
            **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        },
    ),
}
CASES["gemma3"].fields["rope_parameters"] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.mark.quick_cells("native-llama-Q4_0", "native-llama-Q8_0", "native-qwen2", "native-gemma3")
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    made, file = CASES[case], tmp_path / "model.gguf"
    model = random_model(made)
    write_model(
        file,
        model,
        made.architecture,
        kind=made.kind,
        fields=made.metadata,
        tensors=made.tensors,
    )
    check_tokens(file, model, made)


@pytest.mark.quick_cells("native-llama-Q4_0")
@pytest.mark.parametrize("case", ["llama-Q4_0", "llama-Q8_0", "qwen2"])
def test_an_adapter_changes_a_file_as_it_changes_the_model(case: str, tmp_path: Path) -> None:
    made, file = CASES[case], tmp_path / "model.gguf"
    model = random_model(made)
    write_model(file, model, made.architecture, kind=made.kind, fields=made.metadata)
    adapter = LoRARequest("a", 1, str(peft_files.write(tmp_path / "adapter", model, seed=1)))
    peft_files.merge(model, tmp_path / "adapter")
    check_tokens(file, model, made, adapter)


def check_tokens(file: Path, model: Any, case: Case, adapter: LoRARequest | None = None) -> None:
    """Asserts that the file's greedy tokens and their log probabilities are the model's."""
    asked = prompts(shortest=case.shortest)
    settings = {"num_blocks": 128, "max_num_seqs": 8, "num_threads": 1} | case.settings
    with LLM(
        file, device="cpu", dtype="float32", enable_lora=adapter is not None, **settings
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in asked],
            GREEDY,
            use_tqdm=False,
            lora_request=adapter,
        )
    for prompt, output in zip(asked, outputs, strict=True):
        token_ids, logprobs = greedy(model, prompt)
        (completion,) = output.outputs
        assert list(completion.token_ids) == token_ids, len(prompt)
        found = [
            step[token_id].logprob
            for step, token_id in zip(completion.logprobs or [], token_ids, strict=True)
        ]
        torch.testing.assert_close(found, logprobs, atol=2e-4, rtol=0)


def random_model(case: Case) -> Any:
    """A random model without norms of ones or biases of zeros, as in tests of families."""
    torch.manual_seed(0)
    made = config(case.name, case.fields)
    made._attn_implementation = "eager"
    model = model_class(case.name)(made).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model
