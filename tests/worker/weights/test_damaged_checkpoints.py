"""Damaged checkpoints are read, or refused with a `CheckpointError` or `ConfigError`."""

import contextlib
import copy
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire.worker.model.config import check_parallel, read_model_spec
from quire.worker.model.families.rotary import max_positions, rope
from quire.worker.model.read_facts import model_facts
from quire.worker.model.rope import rotary_table
from quire.worker.rank.executor import make_executor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError, ConfigError
from quire.worker.text.tokenizer import Tokenizer
from quire.worker.weights.checkpoint import INDEX_NAME, SINGLE_NAME, open_checkpoint
from quire.worker.weights.fields import Fields

ConfigOf = Callable[..., Any]
DEEP = "[" * 200_000
CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 1.0,
    },
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "sliding_window": 64,
    "layer_types": ["full_attention"],
    "quantization_config": None,
}
TOKENIZER_CONFIG = {
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    "bos_token": {"content": "<s>"},
    "eos_token": "</s>",
}
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**12, 10**400])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["..", "../x", "/etc/passwd", "\0", "a" * 1000, "{% if", "{{" * 3000]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value within a JSON value, starting with itself."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@st.composite
def damaged(draw: st.DrawFn, sound: Any) -> Any:
    """``sound`` with values replaced or removed in one place or two."""
    result = {"": copy.deepcopy(sound)}
    for _ in range(draw(st.integers(1, 2))):
        path = ("", *draw(st.sampled_from(list(places(result[""])))))
        holder: Any = result
        for key in path[:-1]:
            holder = holder[key]
        if len(path) > 1 and draw(st.booleans()) and isinstance(holder, dict):
            del holder[path[-1]]
        else:
            holder[path[-1]] = draw(values)
    return result[""]


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path_factory.mktemp("damaged") / "copy"))


def reads_or_refuses(read: Callable[[], object]) -> None:
    with contextlib.suppress(CheckpointError, ConfigError):
        read()


def weights_file(header: str, *, data: int = 64) -> bytes:
    content = header.encode()
    return struct.pack("<Q", len(content)) + content + bytes(data)


@given(config=damaged(CONFIG), generation=damaged({"eos_token_id": [2]}))
def test_any_config_is_read_or_refused(folder: Path, config: Any, generation: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))

    def read() -> None:
        model_facts(EngineConfig(model=folder), with_fingerprint=False)
        check_parallel(read_model_spec(folder), 2)

    reads_or_refuses(read)


@given(index=damaged({"metadata": {}, "weight_map": {"a": SINGLE_NAME, "b": "2.safetensors"}}))
def test_any_index_is_read_or_refused(tmp_path_factory: Any, index: Any) -> None:
    folder = tmp_path_factory.mktemp("index")
    for name in (SINGLE_NAME, "2.safetensors"):
        save_file({"a": torch.zeros(2)}, folder / name)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    reads_or_refuses(lambda: open_checkpoint(folder))


@given(
    header=damaged(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
            "b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
        }
    )
)
def test_any_header_is_read_or_refused(tmp_path_factory: Any, header: Any) -> None:
    folder = tmp_path_factory.mktemp("header")
    (folder / SINGLE_NAME).write_bytes(weights_file(json.dumps(header)))
    reads_or_refuses(lambda: open_checkpoint(folder).find("a", (4, 2)))


@given(config=damaged(TOKENIZER_CONFIG))
def test_any_tokenizer_config_is_read_or_refused(tmp_path_factory: Any, config: Any) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reads_or_refuses(lambda: Tokenizer.load(folder))


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    Backend(WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")).save(str(folder / "tokenizer.json"))


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_theta", -1, "rope_theta=-1 must be a finite number above 0"),
        ("rope_theta", 0, "rope_theta=0 must be a finite number above 0"),
        ("rope_theta", float("nan"), "rope_theta=nan must be a finite number above 0"),
        ("rms_norm_eps", "1e-6", "rms_norm_eps='1e-6' must be a finite number above 0"),
        ("max_position_embeddings", 10**12, "=1000000000000 must be an integer of 1 or more, at"),
        ("eos_token_id", 320, "eos_token_id=320 must be a token of the vocabulary of 320"),
        ("eos_token_id", [2, -1], "eos_token_id=-1 must be a token of the vocabulary of 320"),
        ("eos_token_id", "</s>", "eos_token_id='</s>' must be a token id"),
        ("num_key_value_heads", -2, "num_key_value_heads=-2 must be an integer of 1 or more"),
        ("tie_word_embeddings", "no", "tie_word_embeddings='no' must be true or false"),
        ("architectures", "LlamaForCausalLM", "architectures='LlamaForCausalLM' must be a list of"),
        ("rope_scaling", "linear", "rope_scaling='linear' must be an object"),
        ("quantization_config", "fp8", "quantization_config='fp8' must be an object"),
    ],
)
def test_a_config_that_cannot_be_meant_is_refused_by_field_and_value(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    config = CONFIG | {"rope_scaling": None, "architectures": ["LlamaForCausalLM"], field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = refusal(lambda: read_model_spec(tmp_path))
    assert refused.startswith(f"{tmp_path}/config.json: ")
    assert message in refused


def test_end_tokens_beyond_the_vocabulary_are_refused_in_the_file_that_names_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 999}')
    assert "generation_config.json: eos_token_id=999" in refusal(lambda: read_model_spec(tmp_path))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('"temperature": NaN', "temperature=nan is out of range: 0 to 100; it is not used"),
        ('"temperature": -1', "temperature=-1 is out of range: 0 to 100"),
        ('"top_p": -5', "top_p=-5 is out of range: above 0, up to 1"),
        ('"top_k": 1e999', "top_k=inf is out of range: 0 or more"),
        ('"min_p": "x"', "min_p='x' is out of range: 0 to 1"),
        ('"repetition_penalty": 0', "repetition_penalty=0 is out of range: 0.01 to 100"),
        ('"max_length": -1', "max_length=-1 is out of range: 1 or more"),
        ('"max_new_tokens": 0', "max_new_tokens=0 is out of range: 1 or more"),
    ],
)
def test_sampling_parameters_that_no_request_may_have_are_warned_of(
    tmp_path: Path, entry: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They are not used, so the model is served."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(f"{{{entry}}}")
    read_model_spec(tmp_path)
    assert f"generation_config.json: {message}" in caplog.text


_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
_ROPE_FIELDS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"),
)


@pytest.mark.parametrize("kind", _ROPES)
def test_any_rotary_embedding_is_finite_or_refused(tmp_path: Path, kind: str) -> None:
    for first, second in combinations(_ROPE_FIELDS, 2):
        for values in product((1, 0, 0.5, 1e-30, 1e30, 1 << 24), repeat=2):
            section = (
                {"rope_type": kind} | _ROPES[kind] | dict(zip((first, second), values, strict=True))
            )
            raw = {"max_position_embeddings": 256, "rope_parameters": section}
            config = Fields(raw, tmp_path / "config.json")
            try:
                described, longest = rope(config, head_size=16), max_positions(config)
            except CheckpointError:
                continue
            table = rotary_table(described, 64, head_size=16, device=torch.device("cpu"))
            assert table.cos_PR.isfinite().all(), section
            assert longest <= 1 << 24, section


def test_yarn_without_a_base_is_refused_by_field(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}
    config = CONFIG | {"architectures": ["LlamaForCausalLM"], "rope_parameters": yarn}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    assert "config.json: rope_theta=1.0 must be more than 1" in refusal(
        lambda: read_model_spec(tmp_path)
    )


@pytest.mark.parametrize("value", [float("nan"), {"factor": float("inf")}])
def test_rope_values_that_are_no_numbers_are_refused_before_transformers_has_them(
    tmp_path: Path, value: object
) -> None:
    config = CONFIG | {"architectures": ["OtherForCausalLM"], "rope_theta": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "config.json: rope_theta=" in refusal(lambda: read_model_spec(tmp_path))


def test_usual_sampling_parameters_are_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    usual = {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(usual | {"max_length": 4096}))
    read_model_spec(tmp_path)


@pytest.mark.parametrize("name", [3, None, ["x"], "../other/model.safetensors", "/etc/hosts", ".."])
def test_an_index_names_files_beside_it_only(tmp_path: Path, name: object) -> None:
    (tmp_path / "other").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "other" / SINGLE_NAME)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    refused = refusal(lambda: open_checkpoint(folder))
    assert f"weight_map has {name!r} for 'a'; it must be the name of a file in" in refused


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_NAME])
def test_json_nested_too_deeply_is_refused_by_file(folder: Path, name: str, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(folder, tmp_path / "deep"))
    (broken / "config.json").write_text(json.dumps(CONFIG))
    (broken / "generation_config.json").write_text("{}")
    (broken / name).write_text(DEEP)

    def read() -> None:
        model_facts(EngineConfig(model=broken))

    assert f"{name}: not JSON that can be read" in refusal(read)


def test_a_header_nested_too_deeply_is_refused_by_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(weights_file(DEEP))
    assert "safetensors header cannot be read" in refusal(lambda: open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "tokenizer_config.json: a JSON list instead of an object"),
        (DEEP, "tokenizer_config.json: not JSON that can be read"),
        ('{"chat_template": 7}', "tokenizer_config.json: chat_template=7 must be a Jinja template"),
        ('{"chat_template": {"a": 1}}', "chat_template={'a': 1} must be a Jinja template"),
        ('{"chat_template": "{% if"}', "the chat template cannot be read"),
    ],
)
def test_a_tokenizer_config_of_another_kind_is_refused(
    tmp_path: Path, content: str, message: str
) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert message in refusal(lambda: Tokenizer.load(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"],
)
def test_weights_that_are_no_numbers_are_refused_while_they_are_read(
    tiny_llama: Path, tmp_path: Path, config_of: ConfigOf, name: str, dtype: str, value: float
) -> None:
    broken = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    tensors = load_file(broken / SINGLE_NAME)
    tensors[name].view(-1)[37] = value
    save_file(tensors, broken / SINGLE_NAME)
    refused = refusal(lambda: make_executor(config_of(broken, dtype=dtype)))
    assert f"{SINGLE_NAME}: tensor {name!r} has values that are NaN or infinite" in refused


def test_weights_that_another_type_cannot_hold_are_refused_with_one_that_can(
    tiny_llama: Path, tmp_path: Path, config_of: ConfigOf
) -> None:
    large = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    tensors = load_file(large / SINGLE_NAME)
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, large / SINGLE_NAME)
    refused = refusal(lambda: make_executor(config_of(large, dtype="float16")))
    assert "beyond the range of torch.float16: set dtype='bfloat16'" in refused
    make_executor(config_of(large, dtype="bfloat16"))[0].close()


def test_large_sums_of_sound_weights_are_no_reason_to_refuse(
    tiny_llama: Path, tmp_path: Path, config_of: ConfigOf
) -> None:
    large = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    tensors = load_file(large / SINGLE_NAME)
    tensors["lm_head.weight"].fill_(3e38)
    save_file(tensors, large / SINGLE_NAME)
    make_executor(config_of(large))[0].close()
