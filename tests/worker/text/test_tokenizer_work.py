"""Tokenizer files that take too long or too much memory, or panic, do not harm the caller."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.text.tokenizer import Tokenizer, encode
from quire.worker.text.tokenizer_process import TokenizerProcess
from quire.worker.text.tokenizer_work import matches_in_bounds

WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
PUBLISHED = [
    f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{WORDS}" + r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'ll)?|[\p{Lu}\p{M}]+[\p{Ll}]*(?:'s)?",
    r"[\p{Lu}&&[^\p{Han}]]*[\p{Ll}]+|[\p{Han}]+",
    r" ?[^(\s|[.,!?…]))]+",
    r" {2,}|[0-9][0-9][0-9]|\s+$|[[:alpha:]]+|[]a]+|\x{41}+",
]
DANGEROUS = [
    *(r"(a+)+b", r"(a|a)*b", r"a*a*b", r"(a?){30}a{30}", "a?" * 7 + "b", "(a|a)" * 7 + "b"),
    *(r"(a)\1", r"(?<x>a+)+", r"(?:a|b){9}", r"(?=.*x).", r"a**", "[a", "a{1,99}a{1,99}b"),
    *("(" + "[^a]" * 99, "(" + "[[:a:]]" * 99, "(" + "[]a]" * 99, "[" * 99, r"(\p{" * 99),
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_patterns_of_the_published_kinds_are_known_to_be_bounded(pattern: str) -> None:
    Regex(pattern)
    assert matches_in_bounds(pattern)


@pytest.mark.parametrize("pattern", DANGEROUS)
def test_patterns_that_may_take_long_are_not(pattern: str) -> None:
    assert not matches_in_bounds(pattern)


def make(
    *, normalizer: Any = None, pre_tokenizer: Any = None, decoder: Any = None
) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, " ": 2}, merges=[]))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.decoder = decoder
    return backend


def catastrophic() -> tokenizers.Tokenizer:
    return make(pre_tokenizer=pre_tokenizers.Split(Regex("(a+)+b"), "isolated"))


def multiplying() -> tokenizers.Tokenizer:
    return make(normalizer=normalizers.Sequence([normalizers.Replace("a", "a" * 999)] * 3))


def test_the_demo_model_encodes_in_this_process() -> None:
    assert Tokenizer.load(demo_model.PATH).encodes_here


def test_another_process_encodes_as_this_one_does() -> None:
    backend = catastrophic()
    tokenizer = Tokenizer(backend)
    assert not tokenizer.encodes_here
    for text in ("", "ab ba aaab", "aé b"):
        assert tokenizer.encode(text) == backend.encode(text).ids


PANICS = "the tokenizer of M cannot encode the text: Onig"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_backend", "text", "timeout_s", "words"),
    [
        (catastrophic, "a" * 40, 99, PANICS),
        (catastrophic, ("a" * 21 + " ") * 9000, 0.1, r"of M takes more than 2\.1 s for a text"),
        (multiplying, "aaa", 99, "of M takes more than 2 GiB for a text of 3 characters"),
    ],
)
def test_what_exceeds_a_limit_is_refused_and_the_next_text_is_not(
    make_backend: Callable[[], tokenizers.Tokenizer], text: str, timeout_s: float, words: str
) -> None:
    process = TokenizerProcess(make_backend().to_str, name="M", timeout_s=timeout_s)
    with pytest.raises(InvalidRequest, match=words):
        process.encode(text, add_special_tokens=True)
    process._timeout_s = 99
    assert process.encode("b b", add_special_tokens=True) == [1, 2, 1]


def test_a_panic_is_an_error_of_the_request() -> None:
    with pytest.raises(InvalidRequest, match=PANICS):
        encode(catastrophic(), "a" * 40, add_special_tokens=True, name="M")


def test_what_the_library_raises_is_an_error_of_the_request() -> None:
    lacking = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="?")), name="M")
    assert lacking.encodes_here
    with pytest.raises(
        InvalidRequest, match="the tokenizer of M cannot encode the text: WordLevel"
    ):
        lacking.encode("b")


def test_texts_are_neither_padded_nor_cut_off(tmp_path: Path) -> None:
    backend = make()
    backend.enable_padding(length=99)
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("abab") == [0, 1, 0, 1]


def test_a_decoder_that_may_take_long_is_refused() -> None:
    for decoder in (
        decoders.Replace(Regex("(a+)+b"), ""),
        decoders.Sequence([decoders.Replace("a", "a" * 99), decoders.Replace("a", "a" * 99)]),
    ):
        with pytest.raises(CheckpointError, match=r"M: the decoder of tokenizer\.json may make"):
            Tokenizer(make(decoder=decoder), name="M")


@pytest.mark.slow
def test_the_offline_api_refuses_a_prompt_and_goes_on(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model.PATH, model)
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    dangerous = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([dangerous, backend.pre_tokenizer])
    backend.save(str(model / "tokenizer.json"))
    params = SamplingParams(max_tokens=2, temperature=0)
    with LLM(model, num_blocks=64, max_model_len=512) as llm:
        with pytest.raises(ValueError, match="prompt 0: the tokenizer of model cannot encode"):
            llm.generate("a" * 40, params, use_tqdm=False)
        (output,) = llm.generate("the cat", params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2
