"""Tokenizer files are read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tokenizer_kinds import SCRIPTS, made
from transformers import AutoTokenizer

from quire.worker.api.errors import CheckpointError
from quire.worker.model.tokenizer_config import named_token_id
from quire.worker.text.tokenizer import Tokenizer


def _saved(folder: Path, config: dict[str, Any], kind: str = "gpt2", **state: Any) -> Tokenizer:
    """Writes the two files; ``state`` goes into the first."""
    text = json.loads(made(kind).to_str()) | state
    (folder / "tokenizer.json").write_text(json.dumps(text))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


def test_a_truncation_and_a_padding_that_were_saved_are_of_the_training(tmp_path: Path) -> None:
    backend = type(made("gpt2")).from_str(made("gpt2").to_str())
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    state = json.loads(backend.to_str())
    tokenizer = _saved(tmp_path, {}, truncation=state["truncation"], padding=state["padding"])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat sat on the mat and that is that, said the", "hi"):
        assert tokenizer.encode(text) == theirs.encode(text) == made("gpt2").encode(text).ids
    assert tokenizer.bound is not None


def _token(content: str, *, special: bool) -> dict[str, Any]:
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    }


def test_a_token_that_only_the_configuration_lists_is_one(tmp_path: Path) -> None:
    size = made("gpt2").get_vocab_size()
    listed = {
        str(size + 1): _token("<|call|>", special=False),
        str(size): _token("<|turn|>", special=True),
    }
    tokenizer = _saved(tmp_path, {"added_tokens_decoder": listed})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a<|turn|>b<|call|>c", "<|call|><|call|>", "plain <|turn"):
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert (tokenizer.token_id("<|turn|>"), tokenizer.token_id("<|call|>")) == (size, size + 1)
    # The same holds where its files are passed on.
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).special_tokens == tokenizer.special_tokens


@pytest.mark.parametrize("flag", [False, None])
def test_a_token_that_the_configuration_names_is_special(tmp_path: Path, flag: bool | None) -> None:
    """Also where the token is not marked as special, or is no added token."""
    state = json.loads(made("gpt2").to_str())
    (end,) = state["added_tokens"]
    added = [] if flag is None else [end | {"special": flag}]
    tokenizer = _saved(tmp_path, {"eos_token": "</s>", "pad_token": "[none]"}, added_tokens=added)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("the</s>cat")
    assert ids == theirs.encode("the</s>cat")
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "thecat"
    assert Tokenizer.load(tmp_path).special_tokens == {end["id"]: "</s>"}
    assert tokenizer.token_id("[none]") is None  # Its id lies beyond the vocabulary.


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "unigram"])
def test_a_tokenizer_names_its_end(tmp_path: Path, kind: str) -> None:
    _saved(tmp_path, {"eos_token": {"content": "</s>"}}, kind=kind)
    assert named_token_id(tmp_path, "eos_token") == made(kind).token_to_id("</s>")
    _saved(tmp_path, {"eos_token": "the"}, kind=kind)
    assert named_token_id(tmp_path, "eos_token") == made(kind).token_to_id("the")
    _saved(tmp_path, {"eos_token": "</s>", "added_tokens_decoder": {"7": {"content": "</s>"}}})
    assert named_token_id(tmp_path, "eos_token") == 7
    _saved(tmp_path, {})
    assert named_token_id(tmp_path, "eos_token") is None


@pytest.mark.parametrize("listed", [[1], {"x": {}}, {"1": "</s>"}, {"1": {"special": True}}])
def test_a_list_of_tokens_that_is_none_is_named(tmp_path: Path, listed: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"added_tokens_decoder=.* must be an object with a t"
    ):
        _saved(tmp_path, {"added_tokens_decoder": listed})


@pytest.mark.slow
def test_a_tokenizer_model_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e\x00")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be conv.*install sentenc"):
        Tokenizer.load(tmp_path)


@pytest.mark.slow
def test_a_sentencepiece_model_alone_is_a_tokenizer(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", *SCRIPTS.values()] * 3),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        byte_fallback=True,
        vocab_size=700,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    tokenizer = Tokenizer.load(tmp_path)
    for text in SCRIPTS.values():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids)
