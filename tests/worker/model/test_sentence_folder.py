"""Files and fields of a sentence-transformers folder are used, or refused by name."""

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from quire.worker.model.config import read_model_spec
from quire.worker.model.pooling import Cut, Dense, LayerNorm, Normalize
from quire.worker.model.sentence_folder import read_scoring, read_sentence_folder, read_use
from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.request.scoring import EmbeddingUse, LogitScore, PairScore, Similarity
from quire.worker.request.vectors import similarity

MODEL, TRANSFORMER = "config_sentence_transformers.json", "sentence_bert_config.json"
BERT = {
    **{"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 100, "hidden_size": 32},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 130},
}
DENSE = {"in_features": 32, "out_features": 8}
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
TEXT = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
LOGITS = {
    "transformer_task": "text-generation",
    "modality_config": {
        "message": {"method": "forward", "method_output_name": "logits", "format": "flat"}
    },
    "module_output_name": "causal_logits",
}
CLASSIFIES = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}


def save(folder: Path, *modules: str, first: str = "", **files: Any) -> None:
    """Writes a folder with ``modules`` behind a Transformer in ``first``. Files are given by names
    without ``.json``, or by the name of a module for its settings."""
    listed = [("Transformer", first), *((each, f"{n}_{each}") for n, each in enumerate(modules, 1))]
    (folder / first).mkdir(exist_ok=True)
    types = [{"type": f"sentence_transformers.models.{kind}", "path": at} for kind, at in listed]
    (folder / "modules.json").write_text(json.dumps(types))
    files = {"config": BERT} | files
    for kind, at in listed[1:]:
        (folder / at).mkdir()
        settings = files.pop(kind, {})
        (folder / at / "config.json").write_text(json.dumps(settings))
    for name, value in files.items():
        at = "" if name == MODEL.removesuffix(".json") else first
        (folder / at / f"{name}.json").write_text(json.dumps(value))


def test_modules_are_read_in_order(tmp_path: Path) -> None:
    modules = ["Pooling", "Normalize", "Dense", "Dropout", "LayerNorm"]
    dense = DENSE | {"activation_function": "torch.nn.modules.activation.GELU", "bias": False}
    save(
        tmp_path,
        *modules,
        first="0_Transformer",
        Pooling={"pooling_mode": ["mean", "cls"], "pooling_mode_max_tokens": True},
        Dense=dense | {"use_residual": True},
        LayerNorm={"dimension": 8},
        config_sentence_transformers={"truncate_dim": 4, "prompts": {"query": "query: "}},
    )
    found = read_sentence_folder(tmp_path)
    assert found is not None
    assert found.transformer == tmp_path / "0_Transformer"
    assert found.pooling is not None
    assert found.pooling.modes == ("mean", "cls")
    normalize, layer, norm, cut = found.pooling.steps
    assert (normalize, cut) == (Normalize(), Cut(4))
    assert isinstance(layer, Dense)
    assert (layer.activation, layer.has_bias, layer.has_residual) == ("GELU", False, True)
    assert isinstance(norm, LayerNorm)
    spec = read_model_spec(tmp_path)
    assert (spec.max_positions, spec.pooling) == (130, found.pooling)


@pytest.mark.parametrize(
    ("settings", "modes"),
    [
        ({}, ("mean",)),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False}, ("mean",)),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, ("last",)),
        ({"pooling_mode": ["mean"]}, ("mean",)),
        (
            {"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_cls_token": True},
            ("cls", "mean_sqrt"),
        ),
    ],
)
def test_poolings_are_those_of_the_library(
    settings: dict[str, Any], modes: tuple[str, ...], tmp_path: Path
) -> None:
    save(tmp_path, "Pooling", Pooling=settings)
    found = read_sentence_folder(tmp_path)
    assert found is not None
    assert found.pooling is not None
    assert found.pooling.modes == modes


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"tokenizer_config": {"model_max_length": 64}}, 64),
        ({"tokenizer_config": {"model_max_length": 1e30}}, 130),
        (
            {
                "sentence_bert_config": {"max_seq_length": 100},
                "tokenizer_config": {"model_max_length": 64},
            },
            100,
        ),
        ({"sentence_roberta_config": {"max_seq_length": 50}}, 50),
        (
            {
                "sentence_bert_config": {
                    "max_seq_length": 100,
                    "tokenizer_args": {"model_max_length": 32},
                }
            },
            32,
        ),
    ],
)
def test_a_text_is_as_long_as_the_folder_allows(
    files: dict[str, Any], limit: int, tmp_path: Path
) -> None:
    save(tmp_path, "Pooling", **files)
    assert read_model_spec(tmp_path).max_positions == limit


@pytest.mark.parametrize(
    ("modules", "files", "message"),
    [
        (
            "Pooling",
            {
                "sentence_bert_config": {"do_lower_case": True},
                "config_sentence_transformers": {"model_type": "CrossEncoder"},
            },
            "do_lower_case=True",
        ),
        ("Pooling", {"sentence_bert_config": {"query_length": 32}}, "query_length=32"),
        ("Pooling", {"sentence_bert_config": LOGITS}, "transformer_task='text-generation'"),
        (
            "Pooling",
            {"sentence_bert_config": {"modality_config": TEXT | {"message": {}}}},
            "format=''",
        ),
        (
            "Pooling Dense",
            {
                "sentence_bert_config": {"modality_config": {"message": {"format": "flat"}}},
                "config_sentence_transformers": {"model_type": "CrossEncoder"},
            },
            "modality_config has 'message'",
        ),
        (
            "Pooling",
            {"config_sentence_transformers": {"similarity_fn_name": "maxsim"}},
            "similarity_fn_name='maxsim'",
        ),
        (
            "Pooling",
            {"sentence_bert_config": {"processing_kwargs": {"text": {"max_length": 8}}}},
            "text=",
        ),
        (
            "Pooling",
            {"sentence_bert_config": {"model_args": {"torch_dtype": "bfloat16"}}},
            "torch_dtype='bfloat16'",
        ),
        (
            "Pooling",
            {"sentence_bert_config": {"tokenizer_args": {"add_eos_token": True}}},
            "add_eos_token=True",
        ),
        ("Pooling", {"Pooling": {"include_prompt": False}}, "include_prompt=False"),
        ("Pooling", {"Pooling": {"attention": True}}, "attention=True"),
        ("Pooling Dense", {"Dense": DENSE | {"gate": 1}}, "gate=1"),
        (
            "Pooling Dense",
            {"Dense": DENSE | {"activation_function": "mine.Tanh"}},
            "activation_function='mine.Tanh'",
        ),
        (
            "Pooling Dense",
            {"Dense": DENSE | {"module_input_name": "token_embeddings"}},
            "module_input_name='token_embeddings'",
        ),
        (
            "Pooling Dense",
            {"Dense": DENSE | {"module_output_name": "scores"}},
            "module_output_name='scores'",
        ),
        (
            "Pooling Normalize",
            {"Normalize": {"module_input_name": "token_embeddings"}},
            "module_input_name='token_embeddings'",
        ),
        ("Pooling LayerNorm", {"LayerNorm": {"dimension": 8, "eps": 1e-3}}, "eps=0.001"),
        (
            "Pooling",
            {"config_sentence_transformers": {"model_type": "SparseEncoder"}},
            "model_type='SparseEncoder'",
        ),
        (
            "Pooling",
            {"config_sentence_transformers": {"model_type": ["CrossEncoder"]}},
            r"model_type=\['CrossEncoder'\]",
        ),
        ("Pooling", {"config_sentence_transformers": {"maxsim": 1}}, "maxsim=1"),
        (
            "Pooling",
            {"config_sentence_transformers": {"default_prompt_name": "q"}},
            "default_prompt_name='q'",
        ),
        ("LogitScore", {}, "module 1 is 'LogitScore'; a SentenceTransformer"),
    ],
)
def test_settings_that_would_change_results_are_refused(
    modules: str, files: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, *modules.split(), **files)
    with pytest.raises(CheckpointError, match=message):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("type_", "path", "message"),
    [
        (
            "custom_st.Transformer",
            "",
            r"json: module 0 is 'custom_st.Transformer': code that comes",
        ),
        ("sentence_transformers.models.Transformer", "../x", "a folder beside the file"),
    ],
)
def test_modules_of_other_places_are_refused(
    type_: str, path: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": type_, "path": path}]))
    with pytest.raises(CheckpointError, match=message):
        read_sentence_folder(tmp_path)


def test_texts_are_written_in_lower_case_where_the_folder_says_so(tmp_path: Path) -> None:
    """As in BGE's folders, whose tokenizers do the same once more."""
    save(tmp_path, "Pooling", sentence_bert_config={"do_lower_case": True})
    assert read_use(tmp_path).written("Über ALL") == "über all"


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "7", "[7]", '[{"type": "x"}]'])
def test_a_list_of_modules_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules.json: (not a list of|lists no) module"):
        read_sentence_folder(tmp_path)


def cross_encoder(**more: Any) -> dict[str, Any]:
    return {"model_type": "CrossEncoder", **more}


@pytest.mark.parametrize(
    ("in_model", "in_config", "is_logistic"),
    [
        ({"activation_fn": IDENTITY}, {}, False),
        ({"activation_fn": SIGMOID}, {"sentence_transformers": {"activation_fn": IDENTITY}}, True),
        ({}, {"sentence_transformers": {"activation_fn": IDENTITY}}, False),
        (
            {},
            {
                "sentence_transformers": {"activation_fn": SIGMOID},
                "sbert_ce_default_activation_function": IDENTITY,
            },
            True,
        ),
        ({}, {"sbert_ce_default_activation_function": IDENTITY}, False),
        ({}, {}, True),
    ],
)
def test_a_classifiers_function_is_the_saved_one(
    in_model: dict[str, Any], in_config: dict[str, Any], is_logistic: bool, tmp_path: Path
) -> None:
    config = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    save(
        tmp_path,
        config=config | {"id2label": {"0": "x"}} | in_config,
        sentence_bert_config=CLASSIFIES,
        config_sentence_transformers=cross_encoder(**in_model),
    )
    assert read_scoring(tmp_path) == PairScore(is_logistic=is_logistic)
    assert read_model_spec(tmp_path).is_classifier
    if not in_model:
        (tmp_path / "modules.json").unlink()
        assert read_scoring(tmp_path) == PairScore(is_logistic=is_logistic)


def test_a_classifier_that_the_folder_does_not_use_is_left_out(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForSequenceClassification"]}  # It has two labels.
    save(tmp_path, "Pooling", config=config)
    assert read_scoring(tmp_path) is None
    assert not read_model_spec(tmp_path).is_classifier


def test_a_head_that_the_architecture_lacks_is_refused(tmp_path: Path) -> None:
    settings = cross_encoder()
    save(tmp_path, sentence_bert_config=CLASSIFIES, config_sentence_transformers=settings)
    with pytest.raises(CheckpointError, match="the model scores by its classifier, which the arch"):
        read_model_spec(tmp_path)


def test_a_dense_layer_may_make_the_score(tmp_path: Path) -> None:
    head = DENSE | {"out_features": 1, "module_output_name": "scores"}
    settings = cross_encoder(prompts={"q": "query: "}, default_prompt_name="q")
    save(tmp_path, "Pooling", "Dense", Dense=head, config_sentence_transformers=settings)
    assert read_scoring(tmp_path) == PairScore(is_logistic=True, prompt="query: ")
    pooling = read_model_spec(tmp_path).pooling
    assert pooling is not None
    assert pooling.reads_pairs
    (tmp_path / "2_Dense/config.json").write_text(json.dumps(head | {"out_features": 2}))
    with pytest.raises(CheckpointError, match="2 scores: a model that scores pairs has one"):
        read_scoring(tmp_path)


@pytest.mark.parametrize(
    ("score", "transformer", "model", "message"),
    [
        ({}, LOGITS, {"activation_fn": "torch.nn.Softplus"}, "scores by 'torch.nn.Softplus'"),
        ({}, LOGITS, {"activation_fn": "my.Sigmoid"}, "scores by 'my.Sigmoid'"),
        ({}, LOGITS, {"keep_in_fp32_modules": ["x"]}, "keep_in_fp32_modules"),
        ({}, {}, {}, "transformer_task='feature-extraction'"),
        ({"false_token_id": None}, LOGITS, {}, "must both be there"),
        ({"scale": 2}, LOGITS, {}, "scale=2"),
        (
            {},
            LOGITS | {"processing_kwargs": {"chat_template": {"enable_thinking": False}}},
            {},
            "enable_thinking=False",
        ),
        ({}, LOGITS | {"modality_config": {}}, {}, "modality_config has no 'message'"),
    ],
)
def test_scores_by_logits_are_read_or_refused(
    score: dict[str, Any],
    transformer: dict[str, Any],
    model: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    good: dict[str, Any] = {
        "LogitScore": {"true_token_id": 7, "false_token_id": 8},
        "sentence_bert_config": LOGITS,
        "config_sentence_transformers": cross_encoder(activation_fn=IDENTITY),
    }
    save(tmp_path, "LogitScore", **good)
    assert read_scoring(tmp_path) == LogitScore(
        true_token_id=7, false_token_id=8, add_generation_prompt=False, is_logistic=False
    )
    (tmp_path / TRANSFORMER).write_text(json.dumps(transformer))
    (tmp_path / MODEL).write_text(json.dumps(cross_encoder(**model)))
    score = {"true_token_id": 7, "false_token_id": 8, **score}
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps(score))
    with pytest.raises(CheckpointError, match=message):
        read_scoring(tmp_path)


def test_texts_may_go_through_the_chat_template(tmp_path: Path) -> None:
    message = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}
    save(
        tmp_path,
        "Pooling",
        sentence_bert_config={
            "modality_config": TEXT | {"message": message},
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        config_sentence_transformers={
            **{"similarity_fn_name": "dot", "prompts": {"q": "find"}, "default_prompt_name": "q"},
        },
    )
    use = read_use(tmp_path)
    assert use == EmbeddingUse(
        similarity="dot", is_chat=True, add_generation_prompt=True, prompt="find"
    )
    assert [each["role"] for each in use.messages("x")] == ["system", "user"]
    use.check_uncut(9, 9)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens=8 cannot cut it"):
        use.check_uncut(9, 8)


def test_vectors_are_compared_as_the_folder_says() -> None:
    first, second = np.array([3, 0], np.float32), np.array([0, 4], np.float32)
    found = [similarity(first, second, each) for each in get_args(Similarity)]
    assert found == [0, 0, -5, -7]
    assert similarity(first, first, "dot") == 9


def test_a_logit_scores_pair_has_the_prompt_as_system_message() -> None:
    score = LogitScore(true_token_id=7, false_token_id=8, add_generation_prompt=True, prompt="p")
    assert [each["role"] for each in score.messages("q", "d")] == ["system", "query", "document"]
    assert score.of({7: -1.0, 8: -1.0}) == 0.5
