"""GGUF files: selection of the file, refusals, and decoding of parts of tensors."""

import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from tests.gguf_files import write_tiny

from quire.kernels.grouped import GroupedWeight
from quire.worker.model.config import read_model_spec
from quire.worker.model.hub import is_hub_name, model_name, with_revision
from quire.worker.model.read_facts import model_facts
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError
from quire.worker.text.tokenizer import Tokenizer
from quire.worker.weights.checkpoint import open_checkpoint
from quire.worker.weights.gguf import weights
from quire.worker.weights.gguf.container import StoredTensor, find_gguf
from quire.worker.weights.gguf.names import PlacedTensor
from quire.worker.weights.loader import Weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf"
    write_tiny(file)
    return file


def read_all(file: Path) -> None:
    """Reads all that a start reads, except for the weights."""
    read_model_spec(file)
    open_checkpoint(file)
    Tokenizer.load(file)


def test_a_file_says_what_a_configuration_does(tiny: Path) -> None:
    spec = read_model_spec(tiny)
    assert (spec.hidden_size, spec.vocab_size, spec.max_positions) == (64, 160, 256)
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids == (1, 2)  # 2 is the end-of-turn marker, which no field names.
    assert not spec.tied
    assert open_checkpoint(tiny).decoded == (
        "9 tensors (9 Q8_0; 0.1 MB) decoded at load: 0.1 MB in bfloat16"
    )


def test_a_chat_template_that_cannot_be_read_is_refused_by_file(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny.read_bytes().replace(b"messages %}", b"messages  }"))
    with pytest.raises(CheckpointError, match=r"broken\.gguf: the chat template cannot be read"):
        Tokenizer.load(broken)


def test_a_tokenizer_is_in_the_file(tiny: Path) -> None:
    tokenizer = Tokenizer.load(tiny)
    high = tokenizer.token_id("hi")
    assert tokenizer.encode("hi<|im_end|>h") == [high, 2, tokenizer.token_id("h")]
    assert tokenizer.decode([0, high or 0, 2]) == "hi"
    assert tokenizer.special_token_ids == {0, 1, 2}
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(chat) == "<s>hi<|im_end|>"


def test_a_folder_with_one_file_means_that_file(tiny: Path, tmp_path: Path) -> None:
    assert find_gguf(tmp_path) is None
    (tmp_path / "mmproj-model-f16.gguf").write_bytes(b"x")
    (tmp_path / "one.gguf").symlink_to(tiny)
    assert find_gguf(tmp_path) == tmp_path / "one.gguf"
    read_all(tmp_path)
    assert model_name(tmp_path / "one.gguf") == "one"
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert find_gguf(tmp_path) is None


def test_several_files_are_listed(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError) as refused:
        read_model_spec(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: has 2 GGUF files, a.gguf, b.gguf: name one, such as {tmp_path}/a.gguf"
    )


def test_a_model_in_parts_is_read_whole(tmp_path: Path) -> None:
    write_tiny(tmp_path / "x.gguf", split_after=4, kind=Kind.Q4_0)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"x-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert find_gguf(tmp_path) == parts[0]
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.files == tuple(parts)
    assert len(checkpoint.tensors) == 20
    whole = tmp_path / "whole"
    whole.mkdir()
    write_tiny(whole / "x.gguf", kind=Kind.Q4_0)
    assert read_model_spec(tmp_path) == read_model_spec(whole)
    assert checkpoint.tensors.keys() == open_checkpoint(whole).tensors.keys()
    device = torch.device("cpu")
    with Weights.open(checkpoint, dtype=torch.float32, device=device) as opened:
        for name, shape in (("model.embed_tokens", (160, 64)), ("model.norm", (64,))):
            assert opened.read(f"{name}.weight", shape).isfinite().all()
    with pytest.raises(CheckpointError, match=r"name the first, x-00001-of-00003\.gguf"):
        read_model_spec(parts[1])
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"1 of them missing: x-00003-of-00003\.gguf"):
        open_checkpoint(parts[0])


def test_a_model_on_the_hub_may_name_its_file() -> None:
    model = Path("org/name-GGUF/Q4/name.Q4_K_M.gguf")
    assert is_hub_name(model)
    assert model_name(model) == model_name(Path("org/name-GGUF@main")) == "org/name-GGUF"
    assert with_revision(model, "v1") == Path(f"{model}@v1")
    assert is_hub_name(Path(f"{model}@v1"))
    cached = Path("/c/models--org--name-GGUF/snapshots/abc/Q4/name.gguf")
    assert model_name(cached) == "org/name-GGUF"


def test_every_byte_of_the_file_is_in_the_fingerprint(tiny: Path, tmp_path: Path) -> None:
    def fingerprint(content: bytes) -> str:
        file = tmp_path / "model.gguf"
        file.write_bytes(content)
        return model_facts(EngineConfig(model=file)).fingerprint

    content = tiny.read_bytes()
    place = content.index(b"<|im_end|>{%")
    changed = content[:place] + b"<|im_eND|>{%" + content[place + 12 :]
    assert fingerprint(content) != fingerprint(changed) != fingerprint(content[:-1] + b"\x7f")


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind in gguf.quants._type_traits])
@pytest.mark.parametrize("heads", [0, 2])
def test_parts_of_a_matrix_are_those_of_the_whole(
    kind: Kind, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_PIECE", 700)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 12, max(64, 2 * block)
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (rows, columns // block * block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        whole = torch.from_numpy(dequantize(stored, kind).reshape(rows, columns)) - 1.0
    if heads:
        whole = whole.view(heads, -1, 2, columns).transpose(1, 2).reshape(rows, columns)
    file = tmp_path / "x.gguf"
    file.write_bytes(b"12345678" + stored.tobytes())
    tensor = PlacedTensor(
        name="x",
        file=file,
        dtype="F32",
        shape=(rows, columns),
        stored=StoredTensor(file=file, name="x", type=kind, shape=(rows, columns), offset=8),
        interleaved_heads=heads,
        offset=-1.0,
    )
    with weights.GgufFile(file, {"x": tensor}, torch.float32) as opened:
        part = opened.get_slice("x")
        for row, column in [
            (slice(3, 9), slice(5, columns - 7)),
            (slice(0, 6), slice(block, None)),
        ]:
            torch.testing.assert_close(
                part[(row, column)], whole[row, column], rtol=0, atol=0, equal_nan=True
            )
        torch.testing.assert_close(opened.get_tensor("x"), whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_q4_0_stay_in_their_blocks(dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "q4.gguf"
    state = write_tiny(file, kind=Kind.Q4_0).state_dict()
    spec, checkpoint = read_model_spec(file), open_checkpoint(file)
    assert re.sub(r"[\d.]+ MB", "…", checkpoint.decoded) == (
        "8 tensors (8 Q4_0; …) kept in blocks of 4 bits; "
        "1 tensor (1 Q4_0; …) decoded at load: … in bfloat16"
    )
    device = torch.device("cpu")
    with Weights.open(checkpoint, dtype=dtype, device=device, stored=spec.stored) as opened:
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
            module = f"model.layers.0.{name}"
            whole = state[f"{module}.weight"]
            for rows, columns, group in [(None, None, 32), ((0, 16), (48, 64), 16)]:
                found = opened.read_matrix(module, whole.shape, rows=rows, columns=columns)
                assert isinstance(found, GroupedWeight)
                assert found.group == group
                expected = whole[slice(*rows or (None,)), slice(*columns or (None,))]
                torch.testing.assert_close(found.decode(), expected.to(dtype), rtol=0, atol=0)
        embedding = opened.read("model.embed_tokens.weight", (160, 64), rows=(7, 99))
        expected = state["model.embed_tokens.weight"][7:99]
        torch.testing.assert_close(embedding, expected.to(dtype), rtol=0, atol=0)


def test_a_file_cut_anywhere_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    content, file = tiny.read_bytes(), tmp_path / "cut.gguf"
    header = content.index(b"blk.0.ffn_up.weight")
    for length in [*range(0, 200), *range(200, header, 97), len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=re.escape(str(file))) as refused:
            read_all(file)
        assert "get it again" in str(refused.value), length


def raw_file(
    *, fields: bytes = b"", num_fields: int = 0, tensors: bytes = b"", num: int = 0
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num, num_fields) + fields + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 1 << 62
HOSTILE = {
    "a key without an end": raw_file(fields=struct.pack("<Q", HUGE), num_fields=1),
    "fields without an end": raw_file(num_fields=HUGE),
    "tensors without an end": raw_file(num=HUGE),
    "numbers without an end": raw_file(
        fields=text("a") + struct.pack("<IIQ", 9, 0, HUGE), num_fields=1
    ),
    "texts without an end": raw_file(
        fields=text("a") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(10_000), num_fields=1
    ),
    "arrays of arrays": raw_file(fields=text("a") + struct.pack("<IIQ", 9, 9, 1), num_fields=1),
    "a type of metadata": raw_file(fields=text("a") + struct.pack("<I", 77), num_fields=1),
    "a key that is no text": raw_file(
        fields=struct.pack("<Q", 2) + b"\xff\xff" + struct.pack("<I", 4), num_fields=1
    ),
    "dimensions": raw_file(tensors=text("a") + struct.pack("<I", 1 << 30), num=1),
    "nothing": b"",
    "another version": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "another format": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_at_once_and_in_little_memory(
    case: str, tmp_path: Path
) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(HOSTILE[case])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        read_model_spec(file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB


Change = Callable[[Any], None]


def changed(path: Path, change: Change) -> Path:
    """The tiny model's file, after ``change`` was applied to its writer."""
    original = gguf.GGUFWriter.write_header_to_file

    def write(writer: Any) -> None:
        change(writer)
        original(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", write)
        write_tiny(path / "changed.gguf")
    return path / "changed.gguf"


def without(key: str) -> Change:
    return lambda writer: writer.kv_data[0].pop(key)


def with_field(key: str, value: Any, add: str) -> Change:
    def change(writer: Any) -> None:
        writer.kv_data[0].pop(key, None)
        getattr(writer, add)(key, value)

    return change


def with_type(name: str, kind: int) -> Change:
    def change(writer: Any) -> None:
        writer.tensors[0][name].dtype = kind

    return change


def renamed(name: str, other: str) -> Change:
    def change(writer: Any) -> None:
        tensors = writer.tensors[0]
        writer.tensors[0] = {(other if key == name else key): x for key, x in tensors.items()}

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    **{
        f"without {key}": (without(f"llama.{key}"), rf"llama\.{key}=None must be an integer of 1")
        for key in ("block_count", "embedding_length", "attention.head_count", "context_length")
    },
    "no architecture": (without("general.architecture"), "must name the model's architecture"),
    "another architecture": (
        with_field("general.architecture", "mamba", "add_string"),
        "architecture 'mamba' are not supported; supported: gemma2, gemma3, llama, phi3",
    ),
    "a field that is not known": (
        with_field("llama.attention.clamp_kqv", 3.0, "add_float32"),
        r"llama.attention.clamp_kqv=3.0: it is not known what that changes",
    ),
    "experts without their choice": (
        with_field("llama.expert_count", 8, "add_uint32"),
        r"llama\.expert_used_count=None must be an integer of 1",
    ),
    "layers that differ": (
        with_field("llama.attention.head_count", [4, 2], "add_array"),
        "layers that differ are not supported",
    ),
    "a text for a number": (
        with_field("llama.block_count", "many", "add_string"),
        "llama.block_count='many' must be an integer",
    ),
    "a tensor that is not known": (
        renamed("blk.0.ffn_up.weight", "blk.0.ffn_sub_norm.weight"),
        "tensor 'blk.0.ffn_sub_norm.weight' is not known",
    ),
    "no embedding": (renamed("token_embd.weight", "x"), "has no tensor token_embd.weight"),
    "a type of a later time": (
        with_type("blk.0.ffn_up.weight", 99),
        "'blk.0.ffn_up.weight' has type 99, which is not read: get the model in another quant",
    ),
    "a type of no weights": (with_type("blk.0.ffn_up.weight", 27), r"type 27 \(I64\)"),
    "rows that are no blocks": (with_type("blk.0.ffn_up.weight", 12), "no whole blocks of Q4_K"),
    "no vocabulary": (without("tokenizer.ggml.tokens"), "prompts and answers are token ids"),
    "no merges": (without("tokenizer.ggml.merges"), "has no tokenizer.ggml.merges"),
    "merges of nothing": (
        with_field("tokenizer.ggml.merges", ["h z0"], "add_array"),
        "its vocabulary makes no tokenizer",
    ),
    "no way to split": (
        with_field("tokenizer.ggml.pre", "klingon", "add_string"),
        "tokenizer.ggml.pre='klingon' is not known",
    ),
    "a kind of tokenizer": (
        with_field("tokenizer.ggml.model", "rwkv", "add_string"),
        "tokenizer.ggml.model='rwkv' is not supported; supported: gpt2, llama",
    ),
    "types of other tokens": (
        with_field("tokenizer.ggml.token_type", [1, 1], "add_array"),
        "2 types of 160 tokens",
    ),
    "an end that is no token": (
        with_field("tokenizer.ggml.eos_token_id", 1000, "add_uint32"),
        "eos_token_id=1000 must be a token of the vocabulary of 160",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_or_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    file = changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as refused:
        read_all(file)
    assert str(file) in str(refused.value)


def test_a_model_that_is_not_described_in_config_json_runs_through_nothing_else(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match="model_impl='transformers' reads no GGUF files"):
        read_model_spec(tiny, model_impl="transformers")
