"""The error messages for checkpoints and configurations that cannot work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quire.worker.blocks.hashing import root_hash
from quire.worker.model.config import check_parallel, read_model_spec
from quire.worker.model.read_facts import model_facts
from quire.worker.rank.executor import make_executor
from quire.worker.request.errors import CheckpointError, ConfigError
from quire.worker.weights.checkpoint import open_checkpoint

ConfigOf = Callable[..., Any]


@pytest.fixture
def copy(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "copy"))


@pytest.fixture
def sharded_copy(tiny_llama_9_3: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_9_3, tmp_path / "copy"))


def edit_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def failure(config_of: ConfigOf, path: Path, **fields: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        make_executor(config_of(path, **fields))
    return str(caught.value)


def test_a_missing_directory_is_named(config_of: ConfigOf, tmp_path: Path) -> None:
    assert failure(config_of, tmp_path / "nowhere").startswith(f"{tmp_path}/nowhere: no such dir")


def test_a_directory_without_config_is_no_checkpoint(config_of: ConfigOf, tmp_path: Path) -> None:
    assert "has no config.json" in failure(config_of, tmp_path)


def test_damaged_config_is_named(config_of: ConfigOf, copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "config.json: not JSON" in failure(config_of, copy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["Qwen9ForCausalLM"]}, "'Qwen9ForCausalLM' is not supported: neither"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method='hqq' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config says F8_E4M3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"dtype": "float64"}, "dtype='float64' is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an integer"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3 KV heads"),
        ({"rope_parameters": {"rope_type": "ntk"}}, "rope_type='ntk' is not supported"),
        ({"rope_parameters": {"mrope_section": [1, 1, 2]}}, "mrope_section=[1, 1, 2] is not supp"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5 is not supported"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' lacks factor"),
    ],
)
def test_a_model_of_a_foreign_kind_is_refused_by_name(
    fields: dict[str, Any], message: str, config_of: ConfigOf, copy: Path
) -> None:
    edit_config(copy, **fields)
    assert message in failure(config_of, copy)


OWN = {"AutoConfig": "configuration_own.OwnConfig"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"auto_map": OWN | {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
            "auto_map.AutoModelForCausalLM='modeling_own.OwnForCausalLM' is not supported: code",
        ),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.LlamaForCausalLM"}},
            "auto_map.AutoModelForCausalLM='own.LlamaForCausalLM' is not supported: code",
        ),
        (
            {"architectures": ["LlamaModel"], "auto_map": {"AutoModel": "o/r--own.LlamaModel"}},
            "auto_map.AutoModel='o/r--own.LlamaModel' is not supported: code",
        ),
        ({"is_causal": False}, "LlamaAttention is not causal"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "'LlamaBidirectionalModel' is not supp"),
    ],
)
def test_code_of_a_checkpoint_is_not_replaced_without_a_word(
    fields: dict[str, Any], message: str, config_of: ConfigOf, copy: Path
) -> None:
    edit_config(copy, **fields)
    assert message in failure(config_of, copy)


def test_code_of_the_class_that_is_computed_is_no_reason_to_refuse(copy: Path) -> None:
    plain = read_model_spec(copy)
    modeling = {"AutoModel": "m.LlamaModel", "AutoModelForCausalLM": "m.LlamaForCausalLM"}
    edit_config(copy, auto_map=OWN | modeling)
    assert read_model_spec(copy) == plain


def test_missing_weights_are_told_apart_from_foreign_ones(config_of: ConfigOf, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    assert "found pytorch_model.bin" in failure(config_of, copy)


def test_a_missing_file_of_several_is_named(config_of: ConfigOf, sharded_copy: Path) -> None:
    files = sorted(sharded_copy.glob("*.safetensors"))
    assert len(files) > 2
    files[1].unlink()
    assert f"names {len(files)} files, 1 of them missing: {files[1].name}" in failure(
        config_of, sharded_copy
    )


@pytest.mark.parametrize("keep", [0, 4, 200, 100_000])
def test_a_truncated_file_is_named_with_both_sizes(
    keep: int, config_of: ConfigOf, copy: Path
) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = failure(config_of, copy)
    assert str(file) in message
    assert f"{keep} bytes" in message
    assert "truncated" in message


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_missing_tensor_is_named(
    tensor_parallel_size: int, config_of: ConfigOf, copy: Path
) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = failure(config_of, copy, tensor_parallel_size=tensor_parallel_size)
    assert "'model.layers.1.mlp.up_proj.weight' [96, 64] is in none of" in message


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("num_hidden_layers", "must be the number of layers in the weights, at most 2"),
        ("hidden_size", "config.json asks for [320, 16777216]"),
        ("vocab_size", "config.json asks for [16777216, 64]"),
        ("num_attention_heads", "config.json asks for [268435456, 64]"),
        ("head_dim", "config.json asks for [67108864, 64]"),
        ("intermediate_size", "config.json asks for [16777216, 64]"),
    ],
)
def test_sizes_are_compared_with_the_files_before_memory_is_taken(
    field: str, message: str, config_of: ConfigOf, copy: Path
) -> None:
    edit_config(copy, **{field: 1 << 24})  # Torch raises a RuntimeError for most of them.
    assert message in failure(config_of, copy)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "head_dim"])
def test_sizes_of_a_model_of_transformers_are_compared_with_the_files(
    field: str, config_of: ConfigOf, copy: Path
) -> None:
    edit_config(copy, **{field: 1 << 24})
    message = failure(config_of, copy, model_impl="transformers")
    assert "weights, but the files hold" in message


def test_a_million_layers_are_refused_before_the_weights_are_there(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    edit_config(copy, num_hidden_layers=10**6)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers=1000000 must .* at most 4096"):
        read_model_spec(copy)


@pytest.mark.parametrize(
    "name", ["num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"]
)
def test_more_experts_than_any_model_has_are_refused_at_once(name: str, copy: Path) -> None:
    """Some classes of transformers would build a module for each in a dry run."""
    edit_config(copy, **{name: 2**24, "moe_intermediate_size": 2**14, "num_expert_group": 2**14})
    with pytest.raises(CheckpointError, match=rf"{name}=16777216 must be at most 4096"):
        read_model_spec(copy)
    edit_config(copy, **{name: 4096})
    read_model_spec(copy)


def test_a_misshapen_tensor_is_named_with_both_shapes(config_of: ConfigOf, copy: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    edit_tensors(copy, lambda tensors: tensors.update({name: tensors[name][:16].clone()}))
    message = failure(config_of, copy)
    assert "model.safetensors: " in message
    assert f"{name!r} has shape [16, 64], config.json asks for [32, 64]" in message


def test_heads_that_cannot_be_shared_are_counted(config_of: ConfigOf, tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="4 attention heads and 2 KV heads; possible: 1, 2, 4"):
        make_executor(config_of(tiny_llama, tensor_parallel_size=3))


def test_kv_heads_divide_or_are_replicated(tiny_llama_9_3: Path) -> None:
    model = read_model_spec(tiny_llama_9_3)
    for size in (1, 3, 9):
        check_parallel(model, size)
    for size in (2, 4, 6, 18):
        with pytest.raises(ConfigError, match="possible: 1, 3, 9"):
            check_parallel(model, size)


def test_old_and_new_ways_of_writing_the_rotary_embedding_are_one(
    copy: Path, tiny_llama: Path
) -> None:
    raw = json.loads((copy / "config.json").read_text())
    theta = raw.pop("rope_parameters")["rope_theta"]
    (copy / "config.json").write_text(json.dumps(raw | {"rope_theta": theta}))
    assert read_model_spec(copy) == read_model_spec(tiny_llama)

    stretch = {"rope_type": "linear", "factor": 2.0}
    edit_config(copy, rope_theta=5e5, rope_scaling=stretch)
    old = read_model_spec(copy).ropes[0]
    edit_config(copy, rope_theta=None, rope_scaling=None)
    edit_config(copy, rope_parameters=stretch | {"rope_theta": 5e5})
    assert read_model_spec(copy).ropes[0] == old
    assert (old.kind, old.factor, old.theta) == ("linear", 2.0, 5e5)


def test_a_window_is_read_from_mistral_as_transformers_reads_it(copy: Path) -> None:
    edit_config(copy, sliding_window=64)
    assert read_model_spec(copy).layers[0].attention.window is None  # a Llama has none
    edit_config(copy, architectures=["MistralForCausalLM"])
    assert read_model_spec(copy).layers[0].attention.window == 64
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    assert read_model_spec(copy).layers[0].attention.window is None
    del raw["sliding_window"]
    (copy / "config.json").write_text(json.dumps(raw))
    assert read_model_spec(copy).layers[0].attention.window == 4096
    edit_config(copy, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(CheckpointError, match="full_attention and sliding_attention: in Mistral"):
        read_model_spec(copy)


def test_facts_name_every_end_token(config_of: ConfigOf, tiny_llama_9_3: Path, copy: Path) -> None:
    facts = model_facts(config_of(tiny_llama_9_3))
    assert facts.eos_token_ids == (2, 5)
    assert (facts.vocab_size, facts.max_model_len, facts.kv_dtype) == (331, 512, "float32")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    facts = model_facts(config_of(copy, dtype="bfloat16", max_model_len=100))
    assert facts.eos_token_ids == (2, 7)
    for token_id, ends in ((9, (2, 7, 9)), (7, (2, 7)), (331, (2, 7))):
        listed = {
            "eos_token": "<|turn|>",
            "added_tokens_decoder": {token_id: {"content": "<|turn|>"}},
        }
        (copy / "tokenizer_config.json").write_text(json.dumps(listed))
        assert read_model_spec(copy).eos_token_ids == ends
    assert (facts.name, facts.max_model_len, facts.kv_dtype) == ("copy", 100, "bfloat16")
    on_gpu = config_of(copy, kv_cache_dtype="fp8", device="cuda", dtype="float16")
    assert model_facts(on_gpu).kv_dtype == "fp8 of float16"
    with pytest.raises(ConfigError, match="with 16-bit queries"):
        model_facts(config_of(copy, kv_cache_dtype="fp8", device="cuda"))


def test_kv_of_other_numbers_has_another_name(config_of: ConfigOf, tiny_llama: Path) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "w4"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "int8", "dtype": "bfloat16"},
        {"kv_cache_dtype": "int8", "quantization": "int8"},
    ]
    facts = [model_facts(config_of(tiny_llama, **fields)) for fields in settings]
    roots = {
        root_hash(model_fingerprint=f.fingerprint, kv_dtype=f.kv_dtype, block_size=16)
        for f in facts
    }
    assert len(roots) == len(settings)
    assert facts[-1].kv_dtype == "int8 of float32"


def test_more_context_than_the_model_was_trained_for_is_refused(
    config_of: ConfigOf, tiny_llama: Path
) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=513: .* trained for 512 positions"):
        model_facts(config_of(tiny_llama, max_model_len=513))


def test_the_fingerprint_tells_weights_apart_and_not_their_place(
    config_of: ConfigOf, tiny_llama: Path, copy: Path
) -> None:
    original = model_facts(config_of(tiny_llama)).fingerprint
    assert model_facts(config_of(copy)).fingerprint == original
    edit_tensors(copy, lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    retrained = model_facts(config_of(copy)).fingerprint
    assert retrained != original
    edit_config(copy, rms_norm_eps=1e-3)
    assert model_facts(config_of(copy)).fingerprint not in (original, retrained)


def test_a_checkpoint_lists_every_tensor(tiny_llama_9_3: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama_9_3)
    stored: dict[str, Any] = {}
    for file in checkpoint.files:
        stored |= load_file(file)
    assert {n: tuple(t.shape) for n, t in stored.items()} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }


def test_windows_are_read_from_qwen_as_transformers_reads_them(copy: Path) -> None:
    def windows(**fields: Any) -> list[int | None]:
        edit_config(copy, architectures=["Qwen3ForCausalLM"], sliding_window=64, **fields)
        return [layer.attention.window for layer in read_model_spec(copy).layers]

    assert windows() == [None, None]
    assert windows(use_sliding_window=True) == [None, None]  # from layer 28 on
    assert windows(max_window_layers=1) == [None, 64]
    assert windows(layer_types=["sliding_attention", "full_attention"]) == [64, None]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"layer_types": ["sliding_attention"]}, "layer_types=['sliding_attention'] must be 2 of"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "must be 2 of full_attention"),
        ({"layer_types": None, "max_window_layers": -1}, "max_window_layers=-1 must be an int"),
    ]
    for fields, message in wrong:
        with pytest.raises(CheckpointError) as caught:
            windows(**fields)
        assert message in str(caught.value)
