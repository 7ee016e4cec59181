"""Tokenizer files are read as transformers reads them."""

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tokenizer_kinds import SCRIPTS, made
from transformers import AutoTokenizer

from quire.worker.request.errors import CheckpointError
from quire.worker.text.tokenizer import Tokenizer
from quire.worker.weights.tokenizer_config import named_token_id, named_tokens, read_config


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
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": made("gpt2").get_vocab_size()}))
    tokenizer = _saved(tmp_path, {"eos_token": "</s>", "pad_token": "[none]"}, added_tokens=added)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("the</s>cat")
    assert ids == theirs.encode("the</s>cat")
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "thecat"
    assert Tokenizer.load(tmp_path).special_tokens == {end["id"]: "</s>"}
    assert tokenizer.token_id("[none]") is None  # Its id lies beyond the model's vocabulary.
    (tmp_path / "config.json").unlink()
    assert Tokenizer.load(tmp_path).token_id("[none]") == theirs.convert_tokens_to_ids("[none]")


_TEXTS = ("</s>", "<s>", "the", "cat", "that", "<|a|>", "<|b|>", "<img>")
_NAMED = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("image_token", "own_token"),
)


def _random_files(rng: random.Random) -> dict[str, Any]:
    """The files of a tokenizer, which name and list special tokens in every way."""
    backend = made(rng.choice(["gpt2", "llama2", "unigram"]))
    state, ids = json.loads(backend.to_str()), backend.get_vocab()

    def listed(most: int) -> dict[str, int]:
        texts = rng.sample(_TEXTS, rng.randrange(most))
        return {text: ids.setdefault(text, len(ids)) for text in texts}

    def flags(**others: Any) -> dict[str, Any]:
        names = ("lstrip", "rstrip", "normalized", "single_word")
        return {name: rng.random() < 0.2 for name in names} | others

    def extra() -> Any:
        texts = rng.choices(_TEXTS, k=rng.randrange(4))
        named = dict(zip(("image_token", "audio_token", "thing"), texts, strict=False))
        return rng.choice([texts, named])

    def names() -> dict[str, Any]:
        found: dict[str, Any] = {n: rng.choice(_TEXTS) for n in _NAMED if rng.random() < 0.2}
        if rng.random() < 0.4:
            found["additional_special_tokens"] = rng.choices(_TEXTS, k=rng.randrange(4))
        return found | ({"extra_special_tokens": extra()} if rng.random() < 0.4 else {})

    there = {token["content"] for token in state["added_tokens"]}
    state["added_tokens"] += [
        flags(id=token_id, content=text, special=rng.random() < 0.5)
        for text, token_id in listed(4).items()
        if text not in there
    ]
    state["added_tokens"].sort(key=lambda token: token["id"])
    config = names() | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if rng.random() < 0.4:
        config["added_tokens_decoder"] = {
            str(token_id): flags(content=text, special=rng.random() < 0.5)
            for text, token_id in listed(5).items()
        }
    older = names()
    for name in set(older) & set(_NAMED[:7]):
        if rng.random() < 0.5:
            older[name] = flags(content=older[name])
    files = {"tokenizer.json": state, "tokenizer_config.json": config}
    more = {"special_tokens_map.json": older, "added_tokens.json": listed(4)}
    return files | {name: more[name] for name in more if rng.random() < 0.6}


@given(seed=st.integers(0, 2**32))
def test_special_tokens_are_those_of_transformers(tmp_path_factory: Any, seed: int) -> None:
    folder, rng = tmp_path_factory.mktemp("tokenizer"), random.Random(seed)
    for name, content in _random_files(rng).items():
        (folder / name).write_text(json.dumps(content))
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert named_tokens(read_config(folder)) == theirs.special_tokens_map
    for _ in range(4):
        text = "".join(rng.choices(["a", " ", *_TEXTS], k=8))
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


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


@pytest.mark.parametrize("kind", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("value", [7, "<a>", [7], [{"id": 1}]])
def test_extra_tokens_that_are_none_are_named(tmp_path: Path, kind: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"extra_special_tokens=.* must be a list of tok"):
        _saved(tmp_path, {kind: value})


def test_bos_of_an_older_folder_is_in_its_template(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    tokenizer = _saved(tmp_path, {"chat_template": "{{ bos_token }}hi"}, kind="llama2")
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<s>hi"
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": "x"}')
    with pytest.raises(CheckpointError, match=r"added_tokens\.json: .* must have an id for each"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_splits_special_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="split_special_tokens=true is not supported"):
        _saved(tmp_path, {"split_special_tokens": True})


def _write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


def test_a_vocabulary_and_merges_are_a_tokenizer(tmp_path: Path) -> None:
    model = json.loads(made("gpt2").to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    _write(tmp_path, {"vocab.json": model["vocab"], "config.json": {"model_type": "opt"}})
    assert not Tokenizer.is_in(tmp_path)
    _write(tmp_path, {"merges.txt": merges, "tokenizer_config.json": {"eos_token": "</s>"}})
    assert Tokenizer.is_in(tmp_path)
    tokenizer, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in (*SCRIPTS.values(), "a</s>b"):
        assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.special_tokens[0] == "</s>"


def test_a_list_of_word_pieces_is_a_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    _write(tmp_path, {"vocab.txt": "\n".join(words), "config.json": {"model_type": "bert"}})
    assert Tokenizer.load(tmp_path).encode("the cats") == [2, 5, 6, 7, 3]


def test_a_file_of_mistral_is_a_tokenizer_with_bos(tmp_path: Path) -> None:
    pieces = [*(bytes([each]) for each in range(256)), b"th", b"the"]
    special = ["<unk>", "<s>", "</s>", "[INST]"]
    tekken = {
        "config": {"pattern": r"\p{L}+|\s+|.", "default_num_special_tokens": 10},
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode()}
            for rank, piece in enumerate(pieces)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    _write(tmp_path, {"tekken.json": tekken, "config.json": {"model_type": "mistral3"}})
    tokenizer = Tokenizer.load(tmp_path, chat_template="{{ bos_token }}[INST]the")
    assert tokenizer.encode("the") == [1, 10 + 257]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert chat == [1, 3, 10 + 257]
    assert tokenizer.decode(chat) == "the"


def test_code_of_a_tokenizer_is_not_replaced_by_a_conversion(tmp_path: Path) -> None:
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    _write(tmp_path, {"tokenizer.model": "x", "tokenizer_config.json": own})
    with pytest.raises(CheckpointError, match=r"auto_map=.* is not supported: code that comes"):
        Tokenizer.load(tmp_path)


@pytest.mark.slow
def test_a_tokenizer_model_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e\x00")
    with pytest.raises(CheckpointError, match=r"the tokenizer cannot be conv.*install sentenc"):
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
