"""Incremental detokenization against the `tokenizers` library's decoding of all tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.prepared import prepared
from tests.tokenizer_kinds import ALL, KINDS, SCRIPTS, loaded, made
from tokenizers import decoders

from quire.worker.request.errors import CheckpointError
from quire.worker.request.outputs import FinishReason, TokenDelta
from quire.worker.text.completions import OfflineCompletion
from quire.worker.text.detokenizer import Detokenizer, readable
from quire.worker.text.tokenizer import Tokenizer

_HALF = "\ufffd"


@pytest.mark.parametrize("kind", ALL)
def test_a_text_is_what_the_library_decodes_wherever_it_is_cut(kind: str) -> None:
    for text in SCRIPTS.values():
        _check_cuts(made(kind), loaded(kind), text)


def _check_cuts(backend: tokenizers.Tokenizer, tokenizer: Tokenizer, text: str) -> None:
    ids = backend.encode(text).ids
    whole = backend.decode(ids)
    assert _text(tokenizer.detokenizer(), ids) == tokenizer.decode(ids) == whole
    for cut in range(len(ids)):
        before, behind = backend.decode(ids[:cut]), ids[cut:]
        told = _text(tokenizer.detokenizer(follows=ids[:cut]), behind)
        if _HALF not in before:
            assert before + told == whole or before == whole[: len(before)] == ""
        # If the output ends here, the text so far stays, except for half a character.
        ended = _text(tokenizer.detokenizer(), ids[:cut])
        assert ended == tokenizer.decode(ids[:cut])
        if _HALF in before and type(backend.decoder) is not decoders.ByteLevel:
            assert ended.endswith(_HALF)
            assert whole.startswith(ended.rstrip(_HALF))
        else:
            assert ended == before


@pytest.mark.parametrize("kind", ALL)
def test_the_bytes_of_tokens_joined_are_the_text(kind: str) -> None:
    backend = made(kind)
    for text, skip in itertools.product(SCRIPTS.values(), (True, False)):
        ids = backend.encode(text).ids
        detokenizer = loaded(kind).detokenizer(skip_special_tokens=skip)
        pieces = []
        for token_id in ids:
            pieces.append(detokenizer.piece(token_id))
            detokenizer.push(token_id)
        assert b"".join(pieces).decode(errors="replace") == backend.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.quick_cells(4)
@pytest.mark.parametrize("kind", ALL)
@given(data=st.data())
def test_any_tokens_are_decoded_as_the_library_does(kind: str, data: st.DataObject) -> None:
    backend = made(kind)
    tokenizer = loaded(kind)
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 1), max_size=30))
    skip = data.draw(st.booleans())
    told = _text(tokenizer.detokenizer(skip_special_tokens=skip), ids)
    assert told == tokenizer.decode(ids, skip_special_tokens=skip)
    theirs = backend.decode(ids, skip_special_tokens=skip)
    if _HALF not in theirs or type(backend.decoder) is decoders.ByteLevel:
        assert told == theirs


def test_a_broken_character_leaves_the_whole_ones_beside_it() -> None:
    tokenizer = loaded("llama2")
    ids = tokenizer.encode("ᎣᏏᏲ", add_special_tokens=False)
    assert made("llama2").decode(ids[:-1]) == _HALF * 8
    assert tokenizer.decode(ids[:-1]) == "ᎣᏏ" + _HALF


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_goes_on_behind_another_one_with_its_space(kind: str) -> None:
    tokenizer = loaded(kind)
    ids = tokenizer.encode("the cat sat", add_special_tokens=False)
    at = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]).rstrip() == "the")
    told = _text(tokenizer.detokenizer(follows=ids[:at]), ids[at:])
    assert tokenizer.decode(ids[:at]) + told == "the cat sat"


def test_one_space_of_the_whole_text_is_stripped() -> None:
    tokenizer = loaded("llama2")
    space, the = (tokenizer.token_id(each) or 0 for each in ("▁", "▁the"))
    begin = tokenizer.encode("")
    for before, text in (([], "  the"), (begin, "  the"), ([*begin, space], "   the")):
        assert _text(tokenizer.detokenizer(follows=before), [space, space, the]) == text


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_offline_text_goes_on_from_the_prompt_in_whatever_steps_it_comes(
    kind: str, data: st.DataObject
) -> None:
    tokenizer, backend = loaded(kind), made(kind)
    ids = backend.encode(data.draw(st.sampled_from([*SCRIPTS.values()]))).ids
    cut = data.draw(st.integers(1, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    texts = []
    for stop in (None, "\0\0"):
        completion = OfflineCompletion(
            prepared("r", prompt, stop=stop), prompt=None, index=0, tokenizer=tokenizer
        )
        ends = sorted(data.draw(st.sets(st.integers(0, len(output)))) | {len(output)})
        for start, end in itertools.pairwise([0, *ends]):
            reason: FinishReason | None = "length" if end == len(output) else None
            step = tuple(output[start:end])
            completion.receive(TokenDelta("r", start, step, (), reason, num_cached_tokens=0))
        texts.append(completion.output().text)
    assert texts[0] == texts[1] == _text(tokenizer.detokenizer(follows=prompt), output)
    if _HALF not in (before := backend.decode(prompt)):
        assert before + texts[0] == backend.decode(ids)


def test_a_special_token_can_be_shown_where_others_are_not() -> None:
    tokenizer = loaded("llama2")
    end = tokenizer.token_id("</s>") or 0
    ids = [*tokenizer.encode("the"), end, *tokenizer.encode("cat")]
    shown = tokenizer.detokenizer(shown_token_ids={end})
    assert _text(shown, ids) == "the</s> cat"


def test_what_is_no_text_by_itself_is_shown_as_its_bytes() -> None:
    assert readable("é".encode()) == "é"
    assert readable("é".encode()[:1]) == "bytes:\\xc3"
    tokenizer = loaded("llama2")
    assert tokenizer.token_text(tokenizer.token_id("<0xE2>") or 0) == "bytes:\\xe2"
    assert tokenizer.token_text(tokenizer.token_id("▁the") or 0) == " the"
    assert tokenizer.token_text(10**6) == ""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_needs_the_whole_text_is_refused_by_name(decoder: Any) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"decoder \((CTC|Fuse, \w+)\) is not supported"):
        Tokenizer(backend)


def _text(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()
