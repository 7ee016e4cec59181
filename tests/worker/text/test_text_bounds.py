"""The lower bound of a text's tokens from its length never exceeds the tokenizer's count."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.worker.text.bounds import text_bound

BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
WORDS = ["the", "cat", " ", "  ", "    ", "é", "🌍", "\x00", "\t\n", "ﬁ", "Ä", "<|x|>", "▁", "q"]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=60).map("".join) | st.text(max_size=60)


def byte_level(*, normalizer: Any = None, first: Any = None, **added: bool) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([first, level]) if first else level
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat the        cat"] * 9, trainer)
    backend.add_special_tokens([AddedToken("<|x|>", **added)])
    return backend


def byte_fallback(*, byte_fallback: bool = True) -> Tokenizer:
    vocabulary = {"<unk>": 0, "▁": 1, "a": 2, **BYTES}
    model = models.BPE(
        vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.ByteFallback()
    return backend


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes behind a split": lambda: byte_level(
        first=pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    ),
    "composed": lambda: byte_level(normalizer=normalizers.NFC()),
    "composed, compatible": lambda: byte_level(normalizer=normalizers.NFKC()),
    "two for one": lambda: byte_level(normalizer=normalizers.Replace("  ", " ")),
    "tokens that swallow space": lambda: byte_level(lstrip=True, rstrip=True),
    "fallback to bytes": byte_fallback,
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "stripped": lambda: byte_level(normalizer=normalizers.Strip()),
    "accents stripped": lambda: byte_level(normalizer=normalizers.StripAccents()),
    "pattern replaced": lambda: byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "text replaced by none": lambda: byte_level(normalizer=normalizers.Replace("a", "")),
    "space removed": lambda: byte_level(first=pre_tokenizers.WhitespaceSplit()),
    "split and removed": lambda: byte_level(first=pre_tokenizers.Split(" ", "removed")),
    "unknown fused": lambda: byte_fallback(byte_fallback=False),
    "unknown words": lambda: Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "unigram": lambda: Tokenizer(models.Unigram([("a", 0.0)], 0, False)),
    "unknown dropped": lambda: Tokenizer(models.BPE({"a": 0}, [])),
}


@cache
def made(name: str) -> Tokenizer:
    return BOUNDED[name]()


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("name", BOUNDED)
@given(text=TEXTS)
def test_a_text_has_no_fewer_tokens_than_its_length_says(name: str, text: str) -> None:
    backend = made(name)
    bound = text_bound(backend)
    assert bound is not None
    assert len(backend.encode(text, add_special_tokens=False).ids) >= bound.fewest_tokens(text)


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_said_where_characters_vanish(name: str) -> None:
    assert text_bound(UNBOUNDED[name]()) is None


def test_the_bound_is_that_of_the_longest_token() -> None:
    backend = byte_level()
    longest = max(map(len, backend.get_vocab()))
    assert text_bound(backend) == (longest, False)
    assert text_bound(byte_level(rstrip=True)) == (longest, True)


def test_nothing_is_said_of_a_tokenizer_that_cuts_texts_off() -> None:
    backend = byte_level()
    backend.enable_truncation(8)
    assert text_bound(backend) is None
