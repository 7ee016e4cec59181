"""Reading of LoRA adapter files, the messages that refuse others, and the store of adapters."""

import json
import math
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.worker.model.spec import Attention, Experts, Layer, Mlp, ModelSpec, Norm, TensorNames
from quire.worker.parts.adapters.peft import Part, check_adapter, read_config, read_parts
from quire.worker.parts.adapters.store import AdapterStore, digest_of
from quire.worker.parts.adapters.weights import read_layers
from quire.worker.request.adapters import LoRARequest
from quire.worker.request.errors import AdapterError, InvalidRequest
from quire.worker.weights.loader import Shard

C, SIZE, HEAD = 32, 48, 8
ATTENTION = Attention(
    num_heads=4, num_kv_heads=2, key_size=HEAD, value_size=HEAD, scale=1.0, rope=None
)
PREFIX = "base_model.model.model.layers.0."
Tensors = dict[str, torch.Tensor]


def spec_of(mlp: Mlp | Experts | None = None, **names: Any) -> ModelSpec:
    norm = Norm(eps=1e-5)
    layer = Layer(attention=ATTENTION, mlp=mlp or Mlp(size=SIZE), norm=norm)
    return ModelSpec(
        hidden_size=C,
        layers=(layer, layer),
        ropes=(),
        final_norm=norm,
        vocab_size=100,
        max_positions=64,
        tied=False,
        dtype="float32",
        eos_token_ids=(),
        names=TensorNames(**names),
    )


def halves(path: str, num_out: int, num_in: int, rank: int = 4) -> Tensors:
    return {
        f"{path}.lora_A.weight": torch.randn(rank, num_in),
        f"{path}.lora_B.weight": torch.randn(num_out, rank),
    }


Q = halves(f"{PREFIX}self_attn.q_proj", C, C)


def write(folder: Path, tensors: Tensors = Q, **config: Any) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def read(folder: Path, spec: ModelSpec | None = None, *, max_rank: int = 64) -> list[Part]:
    return list(read_parts(folder, spec or spec_of(), max_rank=max_rank))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3': only LoRA adapters are served"),
        ({"use_dora": True}, "use_dora=True: DoRA is not served"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: whole modules"),
        ({"bias": "all"}, "bias='all': biases are not served; train with bias='none'"),
        ({"lora_bias": True}, "lora_bias=True: biases are not served"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\]: trained tokens"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config=.*KaSA changes the model's own weights"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora=.*block-diagonal LoRA is not served"),
        ({"monteclora_config": {"num_samples": 8}}, "monteclora_config=.*MonteCLoRA is not"),
        ({"layer_replication": [[0, 1]]}, "layer_replication=.*another model"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'.*save it"),
        ({"init_lora_weights": 1}, "init_lora_weights=1"),
        ({"r": 0}, "r=0: must be an integer of 1 or more"),
        ({"r": True}, "r=True: must be an integer"),
        ({"lora_alpha": "8"}, "lora_alpha='8': must be a number"),
        ({"lora_alpha": math.inf}, "lora_alpha=inf: must be a number"),
        ({"rank_pattern": [1]}, "rank_pattern: must be an object"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: 0 of 'q_proj' must be a number above 0"),
        (
            {"alpha_pattern": {"(": 1}},
            r"alpha_pattern: '\(' is no regular expression that RE2 takes \(missing \): ",
        ),
        ({"alpha_pattern": {"(?!a)b": 1}}, r"alpha_pattern: .*\(invalid perl operator: \(\?!"),
        ({"alpha_pattern": {"a" * 1001: 1}}, "1011 characters: at most 1000.*name the modules"),
        ({"rank_pattern": dict.fromkeys(map(str, range(2001)), 1)}, "2000 names at most"),
        ({"rank_pattern": {f"{n:0900}": 1 for n in range(112)}}, "100000 characters at most"),
    ],
)
def test_a_configuration_that_is_not_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read_config(write(tmp_path, **config))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "has no tensors"),
        (halves("base_model.model.lm_head", 100, C), "embeddings and of the LM head"),
        (halves("base_model.model.model.embed_tokens", C, 100), "embeddings and of the LM head"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 100)},
            "embeddings and of the LM head",
        ),
        ({"base_model.model.lm_head.weight": torch.zeros(100, C)}, "save_embedding_layers=False"),
        ({f"{PREFIX}mlp.up_proj.weight": torch.zeros(4, C)}, "without modules_to_save"),
        ({f"{PREFIX}mlp.up_proj.lora_magnitude_vector": torch.zeros(4)}, "DoRA is not served"),
        ({f"{PREFIX}mlp.up_proj.lora_B.bias": torch.zeros(4)}, "biases are not served"),
        (
            halves("base_model.model.model.layers.2.self_attn.q_proj", C, C),
            "no linear module of that name in its 2 layers; each has mlp.down_proj, mlp.gate_proj",
        ),
        (halves(f"{PREFIX}self_attn.qkv_proj", 2 * C, C), "no linear module of that name"),
        (
            halves("base_model.model.vision_tower.layers.0.self_attn.q_proj", C, C),
            "no linear module of that name",
        ),
        (halves(f"{PREFIX}self_attn.q_proj", C, C + 1), r"has shape \[4, 33\], where .*\[4, 32\]"),
        (halves(f"{PREFIX}self_attn.k_proj", C, C), r"has shape \[32, 4\], where .*\[16, 4\]"),
        (halves(f"{PREFIX}self_attn.q_proj", C, C, rank=8), r"ask for \[4, 32\]"),
        (dict([next(iter(Q.items()))]), "layers.0.self_attn.q_proj has no lora_B"),
        (Q | halves("model.layers.0.self_attn.q_proj", C, C), "is there twice"),
        (
            Q | halves("base_model.model.model.language_model.layers.0.self_attn.q_proj", C, C),
            "has a second adapter under another name",
        ),
        ({name: each.double() for name, each in Q.items()}, "has type F64; it must be F32"),
    ],
)
def test_tensors_that_are_not_served_are_refused_by_name(
    tmp_path: Path, tensors: Tensors, words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        read(write(tmp_path, tensors))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("mlp.experts.3.gate_proj", "routed experts"),
        ("mlp.experts", "routed experts"),
        ("mlp.gate", "routers"),
        ("mlp.shared_expert_gate", "routers"),
    ],
)
def test_of_a_mixture_only_the_shared_expert_may_change(
    tmp_path: Path, path: str, words: str
) -> None:
    experts = Experts(mlp=Mlp(size=8), num_experts=4, top_k=2, shared=Mlp(size=SIZE))
    tensors = halves(f"{PREFIX}{path}", 8, C)
    with pytest.raises(AdapterError, match=f"adapters of {words} are not served"):
        read(write(tmp_path / "bad", tensors), spec_of(experts))
    shared = halves(f"{PREFIX}mlp.shared_experts.up_proj", SIZE, C)
    (part,) = read(write(tmp_path / "good", shared), spec_of(experts))
    assert (part.module.layer, part.module.roles) == ("layers.0.shared.gate_up", ("up",))


def test_what_velora_keeps_for_training_is_passed_over(tmp_path: Path) -> None:
    embed = {f"{PREFIX}self_attn.q_proj.lora_velora_embed": torch.zeros(1)}
    (part,) = read(write(tmp_path, Q | embed, velora_config={"num_groups": 64}))
    assert part.module.roles == ("q",)


def test_a_rank_above_the_limit_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="has rank 4, max_lora_rank is 2: set max_lora_rank=4"):
        read(write(tmp_path), max_rank=2)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json: No such file"):
        read(tmp_path)
    write(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(AdapterError, match="truncated or damaged"):
        read(tmp_path)
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(b'"shape":[4,32]', b'"shape":[4,31]')
    weights.write_bytes(content[:8] + header + content[8 + size :])
    with pytest.raises(AdapterError, match="has 512 bytes, and the shape"):
        read(tmp_path)
    weights.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is of a format that is not read"):
        read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_no_numbers_are_refused(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    tensors = {name: each.to(dtype, copy=True) for name, each in Q.items()}
    check_adapter(write(tmp_path, tensors), spec_of(), max_rank=64, dtype="bfloat16")
    tensors[f"{PREFIX}self_attn.q_proj.lora_B.weight"][3, 1] = value
    with pytest.raises(AdapterError, match=r"lora_B\.weight' has values that are NaN, or"):
        check_adapter(write(tmp_path, tensors), spec_of(), max_rank=64, dtype="bfloat16")


def test_a_value_beyond_the_type_that_is_computed_in_is_refused(tmp_path: Path) -> None:
    tensors = {name: each.clone() for name, each in Q.items()}
    tensors[f"{PREFIX}self_attn.q_proj.lora_A.weight"][0, 0] = 1e5
    check_adapter(write(tmp_path, tensors), spec_of(), max_rank=64, dtype="bfloat16")
    with pytest.raises(AdapterError, match="infinite as float16"):
        check_adapter(tmp_path, spec_of(), max_rank=64, dtype="float16")


def test_patterns_say_the_rank_and_the_scale_of_each_module(tmp_path: Path) -> None:
    names = [f"{PREFIX}self_attn.{name}_proj" for name in "qo"]
    names += [name.replace("layers.0", "layers.1") for name in names]
    tensors: Tensors = {}
    for name, rank in zip(names, (2, 4, 6, 4), strict=True):
        tensors |= halves(name, C, C, rank)
    config = {
        "rank_pattern": {r"^model\.layers\.1\.self_attn\.q_proj": 6, "q_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.o_proj": 3},
    }
    plain = read(write(tmp_path / "plain", tensors, **config))
    rooted = read(write(tmp_path / "rooted", tensors, use_rslora=True, **config))
    assert [part.scale for part in plain] == [8 / 2, 8 / 4, 8 / 6, 3 / 4]
    roots = [8 / 2**0.5, 8 / 2, 8 / 6**0.5, 3 / 2]
    assert [part.scale for part in rooted] == pytest.approx(roots)


def test_a_pattern_that_backtracks_without_end_is_matched_as_fast_as_others(
    tmp_path: Path,
) -> None:
    """Python's `re` would take 2^60 steps for each name, and let no other thread run."""
    pattern = "(.|.)" * 60 + "!|v_proj"
    adapter = halves(f"{PREFIX}self_attn.v_proj", C // 2, C, 8)
    (part,) = read(write(tmp_path, adapter, rank_pattern={pattern: 8}))
    assert part.scale == 1


@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.",
        "base_model.model.model.language_model.",
        "model.",
        "language_model.model.",
    ],
)
def test_names_of_a_bare_decoder_and_of_a_larger_model_are_known(
    tmp_path: Path, prefix: str
) -> None:
    (part,) = read(write(tmp_path, halves(f"{prefix}layers.1.self_attn.v_proj", C // 2, C)))
    assert (part.module.number, part.module.layer, part.module.roles) == (1, "layers.1.qkv", ("v",))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_its_own_rows_and_columns(tmp_path: Path, size: int) -> None:
    """Fused modules and modules of one projection each yield the same rows."""
    torch.manual_seed(0)
    sizes = {"q": C, "k": C // 2, "v": C // 2}
    split = {role: halves(f"{PREFIX}self_attn.{role}_proj", sizes[role], C) for role in sizes}
    a_RI = split["q"][f"{PREFIX}self_attn.q_proj.lora_A.weight"]
    fused_name = f"{PREFIX}self_attn.qkv_proj"
    fused = {
        f"{fused_name}.lora_A.weight": a_RI,
        f"{fused_name}.lora_B.weight": torch.cat(
            [split[role][f"{PREFIX}self_attn.{role}_proj.lora_B.weight"] for role in sizes]
        ),
    }
    tensors: Tensors = {}
    for role, own in split.items():
        tensors |= own | {f"{PREFIX}self_attn.{role}_proj.lora_A.weight": a_RI.clone()}
    tensors |= halves(f"{PREFIX}self_attn.o_proj", C, C)
    tensors |= halves(f"{PREFIX}mlp.down_proj", C, SIZE)
    one = write(tmp_path / "one", tensors)
    other = write(tmp_path / "other", fused)
    fused_spec = spec_of(q="self_attn.qkv_proj", k="self_attn.qkv_proj", v="self_attn.qkv_proj")
    downs, outs = [], []
    for rank in range(size):
        options: Any = {
            "shard": Shard(rank=rank, size=size), "dtype": torch.float32, "max_rank": 64
        }  # fmt: skip
        ours = read_layers(one, spec_of(), **options)
        (whole,) = read_layers(other, fused_spec, **options)["layers.0.qkv"]
        apart = ours["layers.0.qkv"]
        assert whole.first_row == 0
        ends = [part.first_row + len(part.b_OR) for part in apart]
        assert [part.first_row for part in apart] == [0, *ends[:2]]
        assert torch.equal(torch.cat([part.b_OR for part in apart]), whole.b_OR)
        assert all(torch.equal(part.a_RI, a_RI) for part in apart)
        (down,), (o,) = ours["layers.0.down"], ours["layers.0.o"]
        assert len(down.b_OR) == len(o.b_OR) == C
        downs.append(down.a_RI)
        outs.append(o.a_RI)
    for name, parts in (("mlp.down_proj", downs), ("self_attn.o_proj", outs)):
        assert torch.equal(torch.cat(parts, 1), tensors[f"{PREFIX}{name}.lora_A.weight"])


def test_the_digest_is_that_of_both_files(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    first = store.put(write(tmp_path / "a"))
    assert store.put(write(tmp_path / "b")) == first == digest_of(tmp_path / "a")
    other_config = store.put(write(tmp_path / "a", lora_alpha=9))
    other_weights = store.put(write(tmp_path / "b", {name: 2 * x for name, x in Q.items()}))
    assert len({first, other_config, other_weights}) == 3
    folder = store.folder(first)
    assert folder is not None
    assert read_config(folder).alpha == 8
    kept = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], each) for name, each in Q.items())
    assert sorted(each.name for each in folder.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors")
    ]


@pytest.mark.parametrize("digest", ["", "..", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64])
def test_what_is_not_there_is_not_found(tmp_path: Path, digest: str) -> None:
    store = AdapterStore(tmp_path / "store")
    assert store.folder(digest) is None
    assert store.hold(digest) is None


def test_a_store_refuses_what_it_cannot_serve_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", max_bytes=600)
    with pytest.raises(AdapterError, match="DoRA"):
        store.put(write(tmp_path / "a", use_dora=True))
    with pytest.raises(AdapterError, match="such a file may have 600"):
        store.put(write(tmp_path / "a"))
    with pytest.raises(AdapterError, match="have the digest"):
        AdapterStore(tmp_path / "store").put(tmp_path / "a", expected="0" * 64)
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "is no regular file"),
        (lambda file: file.symlink_to("/dev/zero"), "is no regular file"),
        (Path.mkdir, "is no regular file"),
        (lambda file: os.truncate(os.open(file, os.O_CREAT | os.O_RDWR), 1 << 35), "may have"),
    ],
    ids=["fifo", "device", "folder", "large"],
)
def test_a_file_without_an_end_is_refused_before_it_is_read(
    tmp_path: Path, name: str, make: Callable[[Path], object], words: str
) -> None:
    folder, store = write(tmp_path / "a"), AdapterStore(tmp_path / "store")
    (folder / name).unlink()
    make(folder / name)
    with pytest.raises(AdapterError, match=f"{name}: .*{words}"):
        store.put(folder)
    assert not (tmp_path / "store").exists()


def test_weights_with_a_long_header_are_refused_unparsed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    header = json.dumps({"__metadata__": {"x": "y" * (4 << 20)}}).encode()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(AdapterError, match=r"header has .* bytes; it may have 4194304"):
        read(folder)


def test_an_adapter_that_does_not_fit_the_model_is_not_kept(tmp_path: Path) -> None:
    def check(copy: Path) -> None:
        raise AdapterError(f"{copy / 'adapter_model.safetensors'}: not for this model")

    folder, store = write(tmp_path / "a"), AdapterStore(tmp_path / "store", check=check)
    with pytest.raises(AdapterError, match=f"^{folder}/adapter_model.safetensors: not for"):
        store.put(folder)
    with store.receiving() as unfinished:
        shutil.copytree(folder, unfinished, dirs_exist_ok=True)
        with pytest.raises(AdapterError, match=r"^0123/adapter_model.safetensors: not for"):
            store.keep(unfinished, expected="0123")
    assert list(store.root.iterdir()) == []
    digest = AdapterStore(tmp_path / "store").put(folder)
    with pytest.raises(AdapterError, match=f"^{folder}/adapter_model.safetensors: not for"):
        store.put(folder)
    assert store.folder(digest) is not None  # Another model may use it.


def test_weights_of_another_format_are_named_by_the_store(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is of a format that is not read"):
        AdapterStore(tmp_path / "store").put(folder)


def test_a_store_removes_what_was_used_longest_ago_but_nothing_held(tmp_path: Path) -> None:
    folders = [write(tmp_path / f"{number}", lora_alpha=number) for number in range(4)]
    num_bytes = sum(each.stat().st_size for each in folders[0].iterdir())
    store = AdapterStore(tmp_path / "store", max_bytes=3 * num_bytes + 10)
    other = AdapterStore(tmp_path / "store")
    digests = [store.put(folder) for folder in folders[:3]]
    held = other.hold(digests[0])
    assert held is not None
    _used(store, *digests)
    digests.append(store.put(folders[3]))
    assert [(store.root / each).exists() for each in digests] == [True, False, True, True]
    held.release()
    held.release()
    _used(store, *digests[2:], digests[0])
    digests[1] = store.put(folders[1])
    assert [(store.root / each).exists() for each in digests] == [True, True, False, True]


def _used(store: AdapterStore, *digests: str) -> None:
    """Sets their times of last use, in this order, to some time ago."""
    for number, digest in enumerate(digests):
        used_s = time.time() - 1000 + number
        os.utime(store.root / digest, (used_s, used_s))


def test_a_store_removes_what_was_never_finished(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store")
    store.put(write(tmp_path / "a"))
    for name, age_s in (("unfinished-old", 2 * 3600), ("unfinished-new", 60)):
        (store.root / name).mkdir()
        os.utime(store.root / name, (time.time() - age_s,) * 2)
    store.prune()
    assert [each.name for each in store.root.iterdir() if each.name.startswith("unf")] == [
        "unfinished-new"
    ]


def test_files_that_come_in_pieces_are_checked_by_their_digest(tmp_path: Path) -> None:
    source, store = write(tmp_path / "a"), AdapterStore(tmp_path / "store")
    digest = digest_of(source)
    with store.receiving() as folder:
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        assert store.keep(folder, expected=digest) == digest
    assert store.folder(digest) is not None
    assert [each.name for each in store.root.iterdir()] == [digest]


@pytest.mark.parametrize("fields", [{"lora_name": ""}, {"lora_name": "a"}, {"lora_name": 3}])
def test_an_adapter_has_a_name_and_a_place(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be a text that is not empty"):
        LoRARequest(**fields)
