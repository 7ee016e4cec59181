"""Draft tokens change only the number of steps that a request takes."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import demo_model
from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams
from quire.worker.blocks.hashing import BlockHash, as_token_ids
from quire.worker.parts.drafts import (
    MAX_STEP_ROWS,
    RECENT_MATCH,
    Drafter,
    RecentOutputs,
    guess,
    guess_after_change,
)
from quire.worker.request.errors import ConfigError
from quire.worker.request.structured import json_constraint

ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}, "is_sure": {"type": "boolean"}},
    "required": ["answer", "is_sure"],
    "additionalProperties": False,
}
QUESTIONS = ["What is Quire?", "How does prefix caching work?", "What is a block?"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.4, seed=3, max_tokens=60, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=8, max_tokens=60, prompt_logprobs=0),
]
Chat = list[dict[str, str]]
KINDS: list[dict[str, object]] = [{}, {"quantization": "int8"}, {"quantization": "w4"}]
VARIANTS: list[dict[str, object]] = [
    {},
    {"tensor_parallel_size": 2},
    {"num_blocks": 24, "max_model_len": 256, "block_size": 16},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 128, "block_size": 4},
]

needs_native = pytest.mark.skipif(
    native.library() is None, reason="in bfloat16 and fewer bits, the native library alone is exact"
)


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    """Repeated questions, whose earlier answers can be drafted."""
    with _llm(speculation=False) as llm:
        first = [[{"role": "user", "content": text}] for text in QUESTIONS]
        answers = llm.chat(first, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    return [
        [*chat, {"role": "assistant", "content": answer.outputs[0].text}, *chat]
        for chat, answer in zip(first, answers, strict=True)
    ]


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("kind", KINDS, ids=["bfloat16", "int8", "w4"])
def test_tokens_and_logprobs_have_the_same_bits(chats: list[Chat], kind: dict[str, object]) -> None:
    with _llm(**kind, speculation=False) as llm:
        expected = [_ask(llm, chats, [number])[0] for number in range(len(chats))]
        assert llm.engine.stats().num_drafted_tokens == 0
    for variant in VARIANTS:
        with _llm(**kind, **variant, speculation=True) as llm:
            alone = [_ask(llm, chats, [number])[0] for number in range(len(chats))]
            num_accepted = llm.engine.stats().num_accepted_tokens
            together = _ask(llm, chats, range(len(chats)))
            assert llm.engine.stats().num_accepted_tokens > num_accepted > 20
        assert alone == together == expected


@pytest.mark.slow
@needs_native
def test_what_follows_the_output_so_far_is_guessed_too(chats: list[Chat]) -> None:
    base = SamplingParams(temperature=0, max_tokens=40)
    asked = [
        replace(base, repetition_penalty=1.02, min_tokens=3, logprobs=1),
        replace(base, temperature=0.3, seed=1, presence_penalty=0.2, frequency_penalty=0.1),
        replace(base, bad_words=["prefix caching", "the block"], logit_bias={300: 2.0}),
        replace(base, structured_outputs=json_constraint(ANSWER), max_tokens=60),
        replace(base, structured_outputs=json_constraint(ANSWER), repetition_penalty=1.1),
    ]
    answers: dict[bool, list[object]] = {}
    for speculation in (False, True):
        with _llm(speculation=speculation) as llm:
            answers[speculation] = [
                [
                    (output.token_ids, output.logprobs)
                    for output in llm.chat(chat, params, use_tqdm=False)[0].outputs
                ]
                for params in asked
                for chat in chats
            ]
            assert (llm.engine.stats().num_accepted_tokens > 50) == speculation
    assert answers[False] == answers[True]


@needs_native
def test_outputs_of_others_are_guessed_from_within_one_salt() -> None:
    question: Chat = [{"role": "user", "content": QUESTIONS[0]}]
    params = SamplingParams(temperature=0, max_tokens=60)
    with _llm(speculation=True) as llm:
        accepted: list[int] = []
        outputs: list[list[int]] = []
        for salt in ("a", "a", "b", "a"):
            if len(accepted) == 3:
                llm.reset_prefix_cache()
            before = llm.engine.stats().num_accepted_tokens
            prompts = [{"prompt_token_ids": _tokens(llm, question), "cache_salt": salt}]
            outputs.append(llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids)
            accepted.append(llm.engine.stats().num_accepted_tokens - before)
    assert outputs == [outputs[0]] * 4
    assert accepted[0] == accepted[2] == accepted[3] < accepted[1]
    assert accepted[1] > len(outputs[0]) / 2


RUNS = st.lists(
    st.tuples(st.sampled_from([b"a", b"b"]), st.lists(st.integers(0, 1), max_size=12)), max_size=6
)


@given(outputs=RUNS, last=st.lists(st.integers(0, 1), max_size=6), max_tokens=st.integers(0, 5))
def test_recent_outputs_tell_what_followed_the_last_tokens_most_recently(
    outputs: list[tuple[bytes, list[int]]], last: list[int], max_tokens: int
) -> None:
    recent = RecentOutputs()
    expected: list[int] = []
    for root, output in outputs:
        recent.add(BlockHash(root), as_token_ids(output))
        for end in range(RECENT_MATCH, len(output)):
            if root == b"a" and output[end - RECENT_MATCH : end] == last[-RECENT_MATCH:]:
                expected = output[end:]
    found = recent.guess(BlockHash(b"a"), as_token_ids(last), max_tokens=max_tokens)
    assert found == expected[:max_tokens]


def test_recent_outputs_are_forgotten_in_two_generations() -> None:
    recent = RecentOutputs(max_tokens=20)
    root = BlockHash(b"a")
    found = []
    for first in (0, 10, 20, 30, 40):
        recent.add(root, as_token_ids(range(first, first + 10)))
        kept = [recent.guess(root, as_token_ids(range(n, n + 4)), max_tokens=1) for n in (0, 10)]
        found.append(kept)
    assert found == [[[4], []], [[4], [14]], [[4], [14]], [[4], [14]], [[], []]]


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(token_ids=TOKENS, max_tokens=st.integers(0, 9))
def test_a_guess_follows_the_last_of_the_longest_matches(
    token_ids: list[int], max_tokens: int
) -> None:
    length, start = _longest_match(token_ids)
    expected = (token_ids[start:] * max_tokens)[:max_tokens] if length >= 2 else []
    assert guess(as_token_ids(token_ids), max_tokens=max_tokens) == expected


@given(token_ids=TOKENS, max_tokens=st.integers(0, 9))
def test_a_guess_after_a_change_follows_what_stood_where_the_last_token_stands(
    token_ids: list[int], max_tokens: int
) -> None:
    length, start = _longest_match(token_ids[:-1])
    expected = (token_ids[start + 1 :] * max_tokens)[:max_tokens] if length >= 4 else []
    assert guess_after_change(as_token_ids(token_ids), max_tokens=max_tokens) == expected


def _longest_match(token_ids: list[int]) -> tuple[int, int]:
    """Length of the last tokens' longest earlier match, at most 16, and the index after it."""
    best = (0, 0)
    for end in range(len(token_ids) - 1):  # The match's last token.
        length = 0
        while length < 16 and end >= length and token_ids[end - length] == token_ids[-1 - length]:
            length += 1
        best = max(best, (length, end + 1))
    return best


def test_a_copy_is_guessed_on_behind_a_changed_token() -> None:
    source = [*range(10, 30)]
    copied = as_token_ids([*source, *range(10, 18), 99])
    assert Drafter().draft(copied, max_tokens=8) == [19, 20, 21, 22]


def test_pauses_grow_while_guesses_fail() -> None:
    drafter, repeated = Drafter(), as_token_ids([5, 6, 7] * 9)
    attempts = []
    for step in range(30):
        drafted = drafter.draft(repeated, max_tokens=8)
        if drafted:
            attempts.append(step)
            drafter.learn(num_drafted=len(drafted), num_accepted=0)
    assert [after - before for before, after in pairwise(attempts)] == [2, 3, 4, 5, 6, 7]


def test_drafts_grow_while_they_are_right_and_stay_where_their_beginning_is() -> None:
    drafter, repeated = Drafter(), as_token_ids([5, 6, 7] * 9)
    sizes = []
    for num_wrong in (0, 3, 8):
        drafted = drafter.draft(repeated, max_tokens=MAX_STEP_ROWS - 1)
        sizes.append(len(drafted))
        drafter.learn(num_drafted=len(drafted), num_accepted=len(drafted) - num_wrong)
    assert sizes == [4, 8, 8]
    assert drafter.draft(repeated, max_tokens=8) == []  # The pause.
    assert len(drafter.draft(repeated, max_tokens=8)) == 4


def test_what_is_forced_comes_first_even_in_a_pause() -> None:
    drafter, repeated = Drafter(), as_token_ids([5, 6, 7] * 9)
    drafter.learn(num_drafted=1, num_accepted=0)
    assert drafter.draft(repeated, max_tokens=8, forced=[1, 2])[:2] == [1, 2]  # In the pause too.


def test_guesses_and_steps_ahead_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="speculation=True: async_scheduling asks for steps"):
        _llm(speculation=True, async_scheduling=True)


def _llm(**settings: object) -> LLM:
    options = {"num_blocks": 512, "num_threads": 1, **settings}
    return LLM(demo_model.PATH, **options)  # type: ignore[arg-type]


def _tokens(llm: LLM, chat: Chat) -> list[int]:
    token_ids: list[int] = llm.chat(chat, SamplingParams(max_tokens=1), use_tqdm=False)[
        0
    ].prompt_token_ids
    return token_ids


def _ask(llm: LLM, chats: list[Chat], numbers: Iterable[int]) -> list[tuple[object, ...]]:
    """All fields of the answers."""
    outputs = llm.chat(
        [chats[number] for number in numbers],
        [PARAMS[number] for number in numbers],
        use_tqdm=False,
    )
    return [
        (each.token_ids, each.text, each.logprobs, output.prompt_logprobs)
        for output in outputs
        for each in output.outputs
    ]
