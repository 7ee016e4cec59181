"""For every model family, greedy tokens and their log probabilities are those of transformers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.golden.oracle import MAX_TOKENS, Checkpoint, prompts, save, with_answers

from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams
from quire.worker.request.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 40},
    "preempted": {"block_size": 4, "num_blocks": 40, "max_model_len": 160},
    "two ranks": {"tensor_parallel_size": 2},
}
"""Engine settings. Each runs the prompts twice, the second time from the prefix cache."""
SHORT, LONG = [1.0, 1.1, 1.3, 1.5], [1.0, 2.0, 4.0, 9.0]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": SHORT,
    "long_factor": LONG,
}
HALVES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
ONE_RANK = ("chunked", "preempted")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 4.0}
YARN |= {"original_max_position_embeddings": 64}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
THETA = {"rope_type": "default", "rope_theta": 1e4}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 6.0}


class Case(NamedTuple):
    name: str
    """Names of transformers' classes."""
    fields: dict[str, Any]
    settings: tuple[str, ...] = tuple(SETTINGS)
    shortest: int = 1
    """Length of the shortest prompt."""


CASES = {
    "llama-yarn": Case("Llama", {"rope_parameters": YARN}),
    "llama-dynamic": Case(
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    ),
    "smollm3": Case("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": Case("Granite", MULTIPLIERS | {"attention_multiplier": 0.3}),
    "granite-swa": Case(
        "GraniteSWA",
        HALVES | MULTIPLIERS | {"attention_multiplier": 0.3, "layer_rope_theta": [1e4, 0]},
    ),
    "granite-swa-defaults": Case(
        "GraniteSWA", {"num_hidden_layers": 5, "sliding_window": 24, "attention_multiplier": 0.3}
    ),
    "phi3": Case("Phi3", {"sliding_window": None}),
    "phi3-short": Case(
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}
    ),
    # transformers switches to the long factors once a sequence exceeds the original length.
    "phi3-long": Case(
        "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}, shortest=33
    ),
    "ministral": Case("Ministral", HALVES | {"head_dim": 16}),
    "ministral3": Case(
        "Ministral3", {"head_dim": 16, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}}
    ),
    "gemma2": Case("Gemma2", HALVES | CAPS | {"head_dim": 16, "query_pre_attn_scalar": 24}),
    "gemma3": Case("Gemma3", HALVES | {"head_dim": 16, "query_pre_attn_scalar": 24}),
    "olmo2": Case("Olmo2", {}, settings=ONE_RANK),
    "olmo3": Case(
        "Olmo3",
        HALVES | {"rope_parameters": {"full_attention": YARN, "sliding_attention": THETA}},
        settings=ONE_RANK,
    ),
    "glm": Case("Glm", {"head_dim": 16}),
    "glm4": Case("Glm4", {"head_dim": 16}),
    "cohere": Case("Cohere", {"logit_scale": 0.8}),
    "cohere2": Case("Cohere2", HALVES | {"logit_scale": 0.5}),
    "starcoder2": Case("Starcoder2", {}),
    "mixtral": Case("Mixtral", {"num_local_experts": 4}),
    "qwen2-moe": Case(
        "Qwen2Moe",
        EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    ),
    "qwen3-moe": Case("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "olmoe": Case("Olmoe", EXPERTS, settings=ONE_RANK),
    "granite-moe": Case(
        "GraniteMoe", MULTIPLIERS | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "granite-moe-swa": Case(
        "GraniteMoeSWA",
        HALVES
        | MULTIPLIERS
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_rope_theta": [1e5, 1e3]},
    ),
    "glm4-moe": Case(
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"head_dim": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5},
            **{"use_qk_norm": True, "first_k_dense_replace": 1},
        },
    ),
}

GPT_OSS = {
    **HALVES,
    **{"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "swiglu_limit": 1.5},
    "rope_parameters": YARN | {"truncate": False},
}
CASES["gpt-oss"] = Case("GptOss", GPT_OSS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def make(case: str) -> Checkpoint:
        if case not in made:
            path = tmp_path_factory.mktemp("family") / case
            save(path, CASES[case].name, CASES[case].fields)
            made[case] = with_answers(path, case_prompts(case))
        return made[case]

    return make


@pytest.mark.quick_cells(
    "native-gemma2-chunked",
    "native-gpt-oss-chunked",
    "native-mixtral-preempted",
    "native-llama-yarn-chunked",
    "native-glm4-moe-chunked",
    "native-phi3-long-chunked",
    "native-cohere2-chunked",
)
@pytest.mark.parametrize(
    ("case", "setting"), [(name, each) for name, case in CASES.items() for each in case.settings]
)
def test_tokens_are_those_of_transformers(
    case: str, setting: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    path, token_ids, logprobs = checkpoint(case)
    asked = [{"prompt_token_ids": prompt} for prompt in case_prompts(case)]
    settings = {"num_blocks": 128, "max_num_seqs": 8, "num_threads": 1} | SETTINGS[setting]
    with LLM(path, device="cpu", **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(asked, GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == token_ids
            for output, expected in zip(outputs, logprobs, strict=True):
                found = output.outputs[0].logprobs
                assert found is not None
                chosen = [
                    each[token].logprob
                    for each, token in zip(found, output.outputs[0].token_ids, strict=True)
                ]
                assert chosen == pytest.approx(expected, abs=2e-4)
        assert setting != "preempted" or llm.engine.stats().num_preemptions > 0


@pytest.mark.quick_cells("native-granite-", "native-gemma2", "native-qwen3-moe", "native-gpt-oss")
@pytest.mark.parametrize(
    ("case", "quantization"),
    [
        ("granite", None),
        ("ministral", None),
        ("gemma2", "int8"),
        ("gemma3", None),
        ("olmo3", None),
        ("glm4", "int8"),
        ("cohere2", None),
        ("starcoder2", "int8"),
        ("qwen2-moe", None),
        ("glm4-moe", None),
        ("qwen3-moe", "w4"),
        ("mixtral", "int8"),
        ("gpt-oss", None),
    ],
)
def test_a_request_has_the_same_bits_alone_as_in_a_batch(
    case: str, quantization: Any, checkpoint: Callable[[str], Checkpoint]
) -> None:
    path, _, _ = checkpoint(case)
    asked = [{"prompt_token_ids": prompt} for prompt in case_prompts(case)]
    with LLM(
        path,
        device="cpu",
        dtype="bfloat16",
        quantization=quantization,
        num_blocks=128,
        num_threads=1,
        enable_prefix_caching=False,
    ) as llm:
        together = llm.generate(asked, GREEDY, use_tqdm=False)
        for prompt, expected in zip(asked, together, strict=True):
            (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert alone.outputs[0].token_ids == expected.outputs[0].token_ids
            assert alone.outputs[0].logprobs == expected.outputs[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "quantization"),
    [
        *[("qwen2-moe", None), ("qwen3-moe", "int8"), ("glm4", None), ("gemma2", None)],
        *[("gemma3", "int8"), ("ministral", None), ("cohere2", None), ("starcoder2", None)],
        *[("gpt-oss", None), ("glm4-moe", "int8")],
    ],
)
def test_a_request_has_the_same_bits_on_any_number_of_ranks(
    case: str, quantization: Any, checkpoint: Callable[[str], Checkpoint]
) -> None:
    if native.library() is None:
        pytest.skip("in bfloat16 this needs the native library")
    path, _, _ = checkpoint(case)
    asked = [{"prompt_token_ids": prompt} for prompt in case_prompts(case)]
    answers = []
    for num_ranks in (1, 2, 4):
        with LLM(
            path,
            device="cpu",
            dtype="bfloat16",
            quantization=quantization,
            num_blocks=128,
            num_threads=1,
            tensor_parallel_size=num_ranks,
            max_num_seqs=8,
            max_num_batched_tokens=40 * num_ranks,
        ) as llm:
            outputs = llm.generate(asked, GREEDY, use_tqdm=False)
            completions = [each.outputs[0] for each in outputs]
            answers.append([(each.token_ids, each.logprobs) for each in completions])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.quick_cells("native-gemma3", "native-olmo3", "native-phi3-short", "native-starcoder2")
@pytest.mark.parametrize(
    "case", [name for name in CASES if "moe" not in name and name != "mixtral"]
)
def test_dense_models_run_in_one_call(
    case: str, checkpoint: Callable[[str], Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    if native.library() is None:
        pytest.skip("there is no native library on this machine")
    path, _, _ = checkpoint(case)
    caplog.set_level("INFO")
    with LLM(path, device="cpu", dtype="bfloat16", num_blocks=16, num_threads=1):
        pass
    assert "computed by quire" in caplog.text
    assert "operation by operation" not in caplog.text


def test_norms_over_all_heads_need_one_rank(checkpoint: Callable[[str], Checkpoint]) -> None:
    path, _, _ = checkpoint("olmo2")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: the model has norms over all"):
        LLM(path, device="cpu", tensor_parallel_size=2)


def case_prompts(case: str) -> list[list[int]]:
    return prompts(shortest=CASES[case].shortest)
