"""Checkpoints in others' layouts, older or nested ones, give the tokens of transformers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.golden.oracle import config, greedy, prompts, save
from tests.golden.test_families import GREEDY, MULTIPLIERS, YARN
from tests.golden.test_through_transformers import LATENT
from tests.worker.weights.packers import quantized_copy
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from quire.llm import LLM
from quire.worker.model.config import read_model_spec
from quire.worker.model.families.registry import FAMILIES
from quire.worker.model.through.dry_run import dry_run
from quire.worker.request.errors import CheckpointError

TEXT: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": None},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28},
    **{"num_attention_heads": 2, "patch_size": 14},
}
QWEN: dict[str, Any] = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"model_type": "gemma3_text", "sliding_window": 24, "sliding_window_pattern": 2},
        VISION,
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}),
    "ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
        VISION | {"model_type": "pixtral"},
    ),
    "llava": ("Llava", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}),
    "llava-next": (
        "LlavaNext",
        {"model_type": "qwen2"},
        VISION | {"model_type": "siglip_vision_model"},
    ),
    "llava-onevision": (
        "LlavaOnevision",
        {"model_type": "qwen2"},
        VISION | {"model_type": "siglip_vision_model"},
    ),
    "internvl": (
        "InternVL",
        {"model_type": "qwen3"},
        {**VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "qwen2-vl": (
        "Qwen2VL",
        {"rope_parameters": MROPE},
        {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
    ),
    "qwen2.5-vl": ("Qwen2_5_VL", {"rope_parameters": MROPE}, QWEN),
    "qwen3-vl": ("Qwen3VL", {"rope_parameters": MROPE}, QWEN | {"deepstack_visual_indexes": [0]}),
    "qwen3-vl-moe": ("Qwen3VLMoe", {"rope_parameters": MROPE} | MOE, QWEN),
    "kimi-k2.5": ("Kimi_K25", LATENT | {"model_type": "deepseek_v3", "head_dim": 16}, VISION),
}


def expect_equal(path: Path, model: Any, **settings: Any) -> None:
    """Asserts that greedy tokens and their log probabilities are those of ``model``."""
    pairs = [greedy(model, prompt) for prompt in prompts()]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(path, device="cpu", num_blocks=128, num_threads=1, **settings) as llm:
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
    for output, (token_ids, logprobs) in zip(outputs, pairs, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == token_ids
        chosen = [
            each[token].logprob
            for each, token in zip(completion.logprobs or [], completion.token_ids, strict=True)
        ]
        assert chosen == pytest.approx(logprobs, abs=1e-4)


def read(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )


def edit(path: Path, **fields: Any) -> None:
    """Sets fields of ``config.json``; ``None`` removes one."""
    file = path / "config.json"
    raw = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def arrange(path: Path) -> None:
    """Gives tensors the names and order of original files, where transformers saves others."""
    file = path / "model.safetensors"
    tensors = {}
    for name, values in load_file(file).items():
        if name.startswith("language_model.model.blocks."):
            name = name.replace("blocks", "layers", 1)
        is_turned = "mlp.experts." in name and values.dim() == 3
        tensors[name] = values.transpose(1, 2).contiguous() if is_turned else values
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.quick_cells("native-llava-True", "native-gemma3-False")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_larger_model(name: str, tied: bool, tmp_path: Path) -> None:
    kind, text, vision = WRAPPERS[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | text | {"tie_word_embeddings": tied},
        vision_config=vision,
        tie_word_embeddings=tied,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(made).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith((".bias", "norm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)
    arrange(tmp_path)
    assert read_model_spec(tmp_path).is_text_part
    whole = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    expect_equal(tmp_path, whole)


@pytest.mark.quick_cells("native")
@pytest.mark.parametrize("change", ["another head", "the same head", "no embedding"])
@pytest.mark.parametrize("model_impl", ["quire", "transformers"])
def test_a_head_of_its_own_in_a_tied_model(change: str, model_impl: str, tmp_path: Path) -> None:
    save(tmp_path, "Llama", {"tie_word_embeddings": True})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    if change == "another head":
        head = head.roll(7, 0)
    tensors["lm_head.weight"] = head
    if change == "no embedding":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    expect_equal(tmp_path, read(tmp_path), model_impl=model_impl)


@pytest.mark.parametrize("kind", ["rope", "nope"])
def test_granite_4_whose_layers_all_attend(kind: str, tmp_path: Path) -> None:
    fields = MULTIPLIERS | {
        **{"attention_multiplier": 0.3, "shared_intermediate_size": 96, "num_local_experts": 0},
        **{"layer_types": ["attention"] * 2, "position_embedding_type": kind},
        **{"mamba_n_heads": 4, "mamba_expand": 2, "mamba_d_head": 32},
    }
    save(tmp_path, "GraniteMoeHybrid", fields)
    assert "mamba_d_conv" in json.loads((tmp_path / "config.json").read_text())
    expect_equal(tmp_path, read(tmp_path))


def test_granite_4_with_mamba_is_refused(tmp_path: Path) -> None:
    made = config("GraniteMoeHybrid", {"mamba_n_heads": 4, "mamba_d_head": 32})
    made.architectures = ["GraniteMoeHybridForCausalLM"]
    made.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="has layers of type"):
        read_model_spec(tmp_path)


def test_yarn_goes_beyond_the_positions_of_training(tmp_path: Path) -> None:
    save(tmp_path, "Llama", {"max_position_embeddings": 64, "rope_parameters": YARN})
    assert read_model_spec(tmp_path).max_positions == 256
    expect_equal(tmp_path, read(tmp_path))


def test_qwen3_coder_says_that_it_has_norms_of_heads(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3Moe", MOE | {"head_dim": 16})
    edit(tmp_path, use_qk_norm=True)
    expect_equal(tmp_path, read(tmp_path))


def test_mixtral_without_a_theta(tmp_path: Path) -> None:
    save(tmp_path, "Mixtral", {"num_local_experts": 4})
    edit(tmp_path, rope_parameters=None)
    expect_equal(tmp_path, read(tmp_path))


def test_a_type_is_taken_from_the_weights_where_none_is_said(tmp_path: Path) -> None:
    save(tmp_path, "Llama", {})
    file = tmp_path / "model.safetensors"
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensors = {name: values.to(dtype) for name, values in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
        edit(tmp_path, dtype=None)
        auto: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert f"torch.{read_model_spec(tmp_path).dtype}" == str(auto.dtype)


@pytest.mark.quick_cells("native-fp8-block", "native-gptq")
@pytest.mark.parametrize(
    "layout", ["fp8-block", "fp8-inv", "modelopt-nvfp4", "packed-order", "gptq", "awq"]
)
def test_quantised_weights_through_transformers(layout: str, tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "intermediate_size": 128, "v_head_dim": 32}
    save(tmp_path / "made", "DeepseekV3", LATENT | sizes | {"moe_intermediate_size": 64})
    packed, meant = quantized_copy(tmp_path / "made", tmp_path, layout)
    file = meant / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})
    expect_equal(packed, read(meant))


def test_a_tensor_that_transformers_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "GPT2", {"n_inner": 96})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)  # a mask, in old files
    tensors["transformer.h.0.attn.gate.weight"] = torch.ones(8)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"account for: transformer\.h\.0\.attn\.gate\.weigh"):
        LLM(tmp_path, device="cpu")


def test_an_old_file_of_qwen_has_its_text_beside_its_vision(tmp_path: Path) -> None:
    flat = TEXT | {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    save(tmp_path, "Qwen2", {})
    expected = read_model_spec(tmp_path)
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    raw = flat | names | {"vision_config": QWEN}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = read_model_spec(tmp_path)
    assert found.is_text_part
    assert (found.layers, found.ropes[0].theta) == (expected.layers, 1e6)


@pytest.mark.parametrize(
    ("kind", "text"), [("Llava", "Llama"), ("Mistral3", "Mistral"), ("Gemma3", "Gemma3Text")]
)
def test_an_old_file_leaves_out_most_of_its_text(kind: str, text: str, tmp_path: Path) -> None:
    meant = json.loads(getattr(transformers, f"{text}Config")().to_json_string())
    name = {"architectures": [f"{kind}ForConditionalGeneration"]}
    found = []
    for section in (meant, {"model_type": meant["model_type"]}):
        (tmp_path / "config.json").write_text(json.dumps(name | {"text_config": section}))
        spec = read_model_spec(tmp_path)
        found.append(replace(spec, eos_token_ids=()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("Own", {"model_type": "own_text"}, r"has its text part \(model_type='own_text'\) as a"),
        ("Step3p7", {"model_type": "step3p5"}, r"text part \(model_type='step3p5'\) as a decoder"),
        ("Own", {"model_type": "llama"}, "can be computed, but no test shows that it answers"),
        (
            "Own",
            {"model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 2},
            "Qwen3_5ForCausalLM has layers of type 'linear_attention'",
        ),
    ],
)
def test_a_larger_model_is_refused_with_what_its_text_part_lacks(
    name: str, text: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": TEXT | text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "gemma4_unified_text", "head_dim": 16}, "layer 1 has key_size=512, layer "),
        ({"model_type": "stablelm"}, "can be computed, but no test shows that it answers alone"),
    ],
)
def test_a_dry_run_tells_what_the_text_part_of_a_larger_model_lacks(
    text: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
    raw = {"architectures": ["OwnForConditionalGeneration"], "text_config": TEXT | kinds | text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message):
        dry_run(
            *(tmp_path, read_model_spec(tmp_path)),
            dtype=torch.float32,
            max_model_len=64,
            is_deterministic=True,
        )


@pytest.mark.quick_cells("native")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_field_that_is_not_there_means_what_it_means_to_transformers(
    architecture: str, tmp_path: Path
) -> None:
    name = architecture.removesuffix("ForCausalLM")
    if name in ("MiMo", "Qwen3VLMoeText"):
        pytest.skip("transformers has no such decoder alone")
    text = {"Gemma3": "Gemma3Text"}.get(name, name)
    class_ = getattr(transformers, f"{text}Config")
    sizes = {"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 64}
    fields: dict[str, Any] = TEXT | sizes | {"num_hidden_layers": 3, "vocab_size": 300_000}
    if name == "GraniteMoeHybrid":
        fields |= {"layer_types": ["attention"] * 3, "num_local_experts": 0}
        fields["time_step_limit"] = (0.0, 1.0)
    del fields["head_dim"]
    full = json.loads(class_(**fields).to_json_string()) | {"architectures": [architecture]}

    def spec(raw: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        read = read_model_spec(tmp_path)
        return replace(read, eos_token_ids=(), num_extra_layers=0)

    for field in sorted(full.keys() - {"architectures"}):
        raw = {key: value for key, value in full.items() if key != field}
        try:
            found = spec(raw)
        except CheckpointError:  # The error names the missing field.
            continue
        meant = json.loads(class_(**raw).to_json_string())
        assert found == spec(meant | {"architectures": [architecture]}), field
