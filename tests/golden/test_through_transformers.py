"""Models that run in transformers' code on Quire's KV cache give transformers' own tokens."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.oracle import (
    MAX_TOKENS,
    Checkpoint,
    config,
    greedy,
    model_class,
    prompts,
    save,
    with_answers,
)
from transformers import AutoModelForCausalLM
from transformers.models.auto import modeling_auto
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quire.llm import LLM, SamplingParams
from quire.worker.model.config import read_model_spec
from quire.worker.model.families.wrappers import decoder_of, may_have
from quire.worker.model.through.dry_run import dry_run
from quire.worker.request.errors import CheckpointError, ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 40},
    "preempted": {"block_size": 4, "num_blocks": 40, "max_model_len": 160},
}
"""Engine settings. Each runs the prompts twice, the second time from the prefix cache."""
HEAD = {"head_dim": 16}
HALVES = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0],
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
    **{"qk_nope_head_dim": 16, "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_inner": 96}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt-neox": ("GPTNeoX", {}),
    "phi": ("Phi", {}),
    "stablelm": ("StableLm", {}),
    "persimmon": ("Persimmon", {}),
    "nemotron": ("Nemotron", {}),
    "helium": ("Helium", HEAD),
    "ernie": ("Ernie4_5", HEAD),
    "exaone4": ("Exaone4", HALVES),
    "seed-oss": ("SeedOss", HEAD),
    "hunyuan": ("HunYuanDenseV1", HEAD),
    "arcee": ("Arcee", {}),
    "apertus": ("Apertus", {}),
    "bitnet": ("BitNet", {}),
    "qwen3-moe": ("Qwen3Moe", HEAD | EXPERTS),
    "qwen2-moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    # Also families that Quire implements itself: the two must agree.
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", HALVES | CAPS | {"head_dim": 16, "query_pre_attn_scalar": 24}),
    "phi3": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def make(case: str) -> Checkpoint:
        if case not in made:
            path = tmp_path_factory.mktemp("through") / case
            save(path, *CASES[case])
            made[case] = with_answers(path, prompts())
        return made[case]

    return make


def asked() -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts()]


@pytest.mark.quick_cells("native-gpt2", "native-qwen2-moe", "pytorch-phi-")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(
    case: str, setting: str, checkpoint: Callable[[str], Checkpoint]
) -> None:
    path, token_ids, logprobs = checkpoint(case)
    settings = {"num_blocks": 128, "max_num_seqs": 8, "num_threads": 1} | SETTINGS[setting]
    with LLM(path, model_impl="transformers", device="cpu", **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(asked(), GREEDY, use_tqdm=False)
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


@pytest.mark.quick_cells("native-gpt2", "native-deepseek")
@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("gpt2", {}),
        ("phi", {}),
        ("nemotron", {"quantization": "int8"}),
        ("exaone4", {}),
        ("apertus", {"kv_cache_dtype": "int8"}),
        ("qwen2-moe", {}),
        ("deepseek-v3", {}),
        ("gemma2", {}),
    ],
)
def test_a_request_has_the_same_bits_alone_as_in_a_batch(
    case: str, more: dict[str, Any], checkpoint: Callable[[str], Checkpoint]
) -> None:
    path, _, _ = checkpoint(case)
    settings: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 128, "num_threads": 1} | more
    with LLM(
        path, model_impl="transformers", device="cpu", enable_prefix_caching=False, **settings
    ) as llm:
        together = llm.generate(asked(), GREEDY, use_tqdm=False)
        for prompt, expected in zip(asked(), together, strict=True):
            (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert alone.outputs[0].token_ids == expected.outputs[0].token_ids
            assert alone.outputs[0].logprobs == expected.outputs[0].logprobs


def test_a_short_row_does_not_depend_on_a_long_one_beside_it(tmp_path: Path) -> None:
    """transformers would use the long factors for all rows of a step once one row is long."""
    save(tmp_path, "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64})
    with LLM(tmp_path, model_impl="transformers", device="cpu", num_blocks=128) as llm:
        together = llm.generate(asked(), GREEDY, use_tqdm=False)
        (alone,) = llm.generate(asked()[1:2], GREEDY, use_tqdm=False)
        assert alone.outputs[0].logprobs == together[1].outputs[0].logprobs


def test_without_the_promise_operations_of_any_kind_run(tmp_path: Path) -> None:
    save(tmp_path, "Llama", {"hidden_act": "mish"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    settings: dict[str, Any] = {"model_impl": "transformers", "device": "cpu", "num_blocks": 64}
    with LLM(tmp_path, deterministic=False, **settings) as llm:
        outputs = llm.generate(asked(), GREEDY, use_tqdm=False)
    expected = [greedy(model, prompt)[0] for prompt in prompts()]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_auto_says_what_computes_the_model_and_why(
    checkpoint: Callable[[str], Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire")
    for case, expected in (
        ("gpt2", "computed through transformers, somewhat slower: quire has no description"),
        ("llama", "computed by quire, which describes this family"),
    ):
        caplog.clear()
        LLM(checkpoint(case)[0], device="cpu", num_blocks=64).engine.close()
        assert expected in caplog.text


def test_without_a_description_quires_own_is_refused(
    checkpoint: Callable[[str], Checkpoint],
) -> None:
    with pytest.raises(CheckpointError, match="'GPT2LMHeadModel' is not supported with model_impl"):
        LLM(checkpoint("gpt2")[0], model_impl="quire", device="cpu")
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: a model that runs through tran"):
        LLM(checkpoint("gpt2")[0], tensor_parallel_size=2, device="cpu")
    with pytest.raises(CheckpointError, match="not supported with model_impl='quire'"):
        LLM(checkpoint("gpt2")[0], model_impl="vllm", device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model_impl='other': one of"):
        LLM(checkpoint("gpt2")[0], model_impl="other", device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "Mamba2",
            {"num_heads": 8, "head_dim": 16},
            "Mamba2ForCausalLM has .*: layers with a state",
        ),
        ("FalconH1", {}, "FalconH1ForCausalLM has mamba_.*: layers with a state"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "has layers of type 'conv'"),
        ("MiniMax", {}, "layers of type 'linear_attention', which are not supported"),
        ("Bloom", {}, "BloomForCausalLM has alibi"),
        ("DeepseekV32", {}, "has index_.*: attention that selects tokens"),
        ("Llama", {"num_kv_shared_layers": 1}, "num_kv_shared_layers: layers that share their KV"),
        ("Llama", {"is_encoder_decoder": True}, "has an encoder and a decoder"),
        (
            "Llama",
            {"architectures": ["LlamaForTokenClassification"]},
            "it is no decoder or encoder of text",
        ),
    ],
)
def test_what_the_configuration_shows_is_refused_without_transformers(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path, name, fields)
    with pytest.raises(CheckpointError, match=message):
        read_model_spec(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("Falcon", {"alibi": False}, "do not call transformers' attention interface"),
        ("GptOss", HEAD | {"num_local_experts": 4}, "has attention sinks, which our attention"),
        ("GraniteSWA", {}, "reads 'config' of its rotary embeddings, which Quire replaces"),
        ("Llama", {"architectures": ["OwnForCausalLM"]}, "'OwnForCausalLM' is not supported"),
        ("Llama", {"hidden_act": "mish"}, "computes 'mish' in .*deterministic=False"),
        (
            *("Llama4Text", HEAD | {"attention_chunk_size": 64, "interleave_moe_layer_step": 3}),
            "neither causal nor a window: attention in chunks is not supported",
        ),
    ],
)
def test_what_a_dry_run_shows_is_refused_before_weights_are_read(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_config(tmp_path, name, fields)
    with pytest.raises(CheckpointError, match=message):
        dry_run(
            *(tmp_path, read_model_spec(tmp_path, model_impl="transformers")),
            dtype=torch.float32,
            max_model_len=256,
            is_deterministic=True,
        )


@pytest.mark.parametrize(
    ("part", "reads", "message"),
    [
        ("input_layernorm", "variance_epsilon", "reads 'variance_epsilon' of a norm, which Quire"),
        ("mlp.act_fn", "beta", "reads 'beta' of a module, which Quire replaces"),
    ],
)
def test_what_transformers_reads_of_a_replaced_module_is_named(
    part: str, reads: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LlamaDecoderLayer.forward

    def read_first(self: LlamaDecoderLayer, *args: Any, **options: Any) -> Any:
        getattr(self.get_submodule(part), reads)
        return forward(self, *args, **options)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", read_first)
    write_config(tmp_path, "Llama", {})
    with pytest.raises(CheckpointError, match=message):
        dry_run(
            *(tmp_path, read_model_spec(tmp_path, model_impl="transformers")),
            dtype=torch.float32,
            max_model_len=256,
            is_deterministic=True,
        )


def test_every_model_in_the_lists_of_transformers_may_be_served() -> None:
    """The lists are read as text where a start checks an architecture."""
    listed = (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )
    for names in listed:
        kinds = [*names, *(each for each in names.values() if isinstance(each, str))]
        assert all(map(may_have, kinds))
    assert not may_have("OwnForCausalLM")
    for kind, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        assert decoder_of(kind) == (name if name.endswith("ForCausalLM") else None)


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}, "vocab_size": 320,'
        '"hidden_size": 64, "max_position_embeddings": 256}'
    )
    with pytest.raises(CheckpointError, match=r"trust_remote_code\) is not run"):
        dry_run(
            *(tmp_path, read_model_spec(tmp_path, model_impl="transformers")),
            dtype=torch.float32,
            max_model_len=256,
            is_deterministic=True,
        )


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, *CASES["gpt2"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"missing keys: transformer\.h\.1\.mlp\.c_fc\.weight"
    ):
        LLM(tmp_path, device="cpu")


def write_config(path: Path, name: str, fields: dict[str, Any]) -> None:
    made = config(name, fields)
    if "architectures" not in fields:
        made.architectures = [model_class(name.removesuffix("Text")).__name__]
    made.save_pretrained(path)
