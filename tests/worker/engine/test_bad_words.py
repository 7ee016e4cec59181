"""Bad words: tokens are those of transformers' with the same words, in any batch."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tests.worker.engine_requests import request, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import demo_model
from quire.llm import LLM, SamplingParams, StructuredOutputsParams
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.spelling import spell_out
from quire.worker.text.reasoning import reasoning_of
from quire.worker.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=24)
PROMPTS = ["The sea", "A planet is", "A harbor is"]
WORDS = ["number of", "page", "-in", "the first", "harbor"]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(demo_model.PATH, dtype="float32", num_blocks=128, num_threads=1) as engine:
        yield engine


def spelled(words: list[str]) -> list[list[int]]:
    """Token ids as in vLLM, but a spelling is left out only if it ends in the other one."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model.PATH)
    found = []
    for word in words:
        bare = tokenizer.encode(word, add_special_tokens=False)
        behind = tokenizer.encode(" " + word, add_special_tokens=False)
        found += [bare] if behind[-len(bare) :] == bare else [bare, behind]
    return found


def spelled_out(params: SamplingParams) -> SamplingParams:
    """``params`` as the offline API passes them to its engine."""
    tokenizer = Tokenizer.load(demo_model.PATH)
    prompt = as_token_ids([5])
    return spell_out(
        params, prompt, tokenizer=lambda: tokenizer, reasoning=reasoning_of, max_model_len=9
    )[0]


def test_the_tokens_are_those_of_transformers(demo: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    outputs = demo.generate(PROMPTS, replace(GREEDY, bad_words=WORDS), use_tqdm=False)
    free = demo.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output, without in zip(outputs, free, strict=True):
        token_ids = output.outputs[0].token_ids
        assert token_ids != without.outputs[0].token_ids
        expected = cast(Any, model).generate(
            torch.tensor([output.prompt_token_ids]),
            do_sample=False,
            max_new_tokens=len(token_ids),
            bad_words_ids=spelled(WORDS),
        )
        assert expected[0, len(output.prompt_token_ids) :].tolist() == list(token_ids)


@pytest.mark.quick_cells("1")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_token_that_is_banned_is_passed_over_in_any_batch(demo: LLM, ranks: int) -> None:
    """With so many greedy rows the head chooses tokens; alone, the sampler does, from logits."""
    free = demo.generate(PROMPTS, GREEDY, use_tqdm=False)
    used = sorted({token for output in free for token in output.outputs[0].token_ids})[:4]
    params = [
        replace(GREEDY, bad_words_token_ids=[[token] for token in used], min_tokens=24),
        replace(GREEDY, logit_bias={used[0]: -100.0, used[-1]: 2.0}),
        GREEDY,
    ]
    asked = [(prompt, each) for prompt in PROMPTS for each in params]
    alone = [demo.generate([prompt], each, use_tqdm=False)[0] for prompt, each in asked]
    with LLM(
        demo_model.PATH,
        dtype="float32",
        num_blocks=128,
        num_threads=1,
        tensor_parallel_size=ranks,
    ) as llm:
        prompts, every = zip(*asked, strict=True)
        together = llm.generate(list(prompts), list(every), use_tqdm=False)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_words_are_spelled_with_and_without_a_space() -> None:
    params = spelled_out(SamplingParams(bad_words=[*WORDS, " page"]))
    assert params.bad_words == ()
    assert sorted(map(list, params.bad_words_token_ids or ())) == sorted(spelled(WORDS))


def sampled(seed: int, words: list[str]) -> SamplingParams:
    return SamplingParams(
        temperature=0.7, seed=seed, max_tokens=40, ignore_eos=True, bad_words=words
    )


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_in_a_batch_and_when_preempted(demo: LLM, is_async: bool) -> None:
    params = [sampled(seed, WORDS if seed % 4 else []) for seed in range(9)]
    prompts = 3 * PROMPTS
    alone = [
        demo.generate(prompt, each, use_tqdm=False)[0].outputs[0].token_ids
        for prompt, each in zip(prompts, params, strict=True)
    ]
    with LLM(
        demo_model.PATH,
        dtype="float32",
        num_blocks=12,
        max_model_len=96,
        num_threads=1,
        async_scheduling=is_async,
    ) as small:
        together = small.generate(prompts, params, use_tqdm=False)
        assert small.engine.stats().num_preemptions > 0
    assert [each.outputs[0].token_ids for each in together] == alone


def test_a_resumed_request_goes_on_with_the_same_tokens(demo: LLM) -> None:
    params = spelled_out(replace(sampled(3, WORDS), temperature=0.0))
    prompt = demo.get_tokenizer().encode("The sea")
    values: dict[str, Any] = {"bad_words_token_ids": params.bad_words_token_ids, "temperature": 0.0}
    whole = run(demo.engine, request("whole", prompt, max_tokens=24, **values))["whole"].token_ids
    cuts = [
        request(str(cut), prompt, max_tokens=24, resumed=whole[:cut], **values)
        for cut in range(1, 24)
    ]
    for cut, output in run(demo.engine, *cuts).items():
        assert (*whole[: int(cut)], *output.token_ids) == whole


def test_among_allowed_tokens_a_word_is_kept_out_while_there_is_another(demo: LLM) -> None:
    bias = {5: 100.0, 31: 50.0}
    for banned, expected in [
        ([], [5, 5, 5, 5, 5]),
        ([[5]], [31, 31, 31, 31, 31]),
        ([[5, 5], [31, 5]], [5, 31, 31, 31, 31]),
        ([[5, 5, 5]], [5, 5, 31, 5, 5]),
        ([[5], [31]], [5, 5, 5, 5, 5]),
    ]:
        for allowed in ([5, 31], None):
            if allowed is None and len(banned) == 2:
                continue
            params = SamplingParams(
                temperature=0,
                max_tokens=5,
                logit_bias=bias,
                allowed_token_ids=allowed,
                bad_words_token_ids=banned,
            )
            output = demo.generate("The sea", params, use_tqdm=False)[0].outputs[0]
            assert list(output.token_ids) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_allowed_tokens_outweigh_all_that_bans_them(demo: LLM, temperature: float) -> None:
    end = 1
    for allowed, banned, expected in [
        ([end], [], [end]),
        ([end, 5], [], [5, 5, 5, 5]),
        ([end, 5], [[5]], [5, 5, 5, end]),
        ([end, 5, 31], [[5]], [31, 31, 31, 31]),
    ]:
        params = SamplingParams(
            temperature=temperature,
            max_tokens=4,
            min_tokens=3,
            logit_bias={5: 100.0, 31: 100.0, end: -50.0},
            allowed_token_ids=allowed,
            bad_words_token_ids=banned,
        )
        output = demo.generate("The sea", params, use_tqdm=False)[0].outputs[0]
        assert list(output.token_ids) == expected


def test_a_form_outweighs_bad_words(demo: LLM) -> None:
    form = StructuredOutputsParams(regex="(a|b)(x)")
    free = SamplingParams(temperature=0, structured_outputs=form)
    first = demo.generate("The sea", free, use_tqdm=False)[0].outputs[0].text[0]
    params = replace(free, bad_words=[first, "x", "ax", "bx"])
    text = demo.generate("The sea", params, use_tqdm=False)[0].outputs[0].text
    assert re.fullmatch("[ab]x", text)
    assert text[0] != first


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"bad_words": [" "]}, r"bad_words=\(' ',\) is out of range: .*, none blank"),
        ({"bad_words": ["x"] * 129}, "at most 128 strings"),
        ({"bad_words": ["x" * 101]}, "of 100 characters"),
        ({"bad_words": [5]}, "bad_words="),
        ({"bad_words_token_ids": [[]]}, "none empty"),
        ({"bad_words_token_ids": [[-1]]}, "lists of token ids"),
        ({"bad_words_token_ids": [5]}, "lists of token ids"),
        ({"bad_words_token_ids": [[1]] * 1025}, "at most 1024 lists"),
        ({"bad_words_token_ids": [[1] * 2**15, [1]]}, "of 32768 tokens together"),
        ({"bad_words_token_ids": [[10**6]]}, "1000000 at position 0 of the bad_words_token_ids"),
    ],
)
def test_what_is_out_of_bounds_is_refused(demo: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        demo.generate("a", SamplingParams(**params), use_tqdm=False)


def test_an_engine_takes_tokens_only(demo: LLM) -> None:
    with pytest.raises(InvalidRequest, match="bad_words are not tokens yet"):
        demo.engine.add_request(request("a", [5], bad_words=["x"]))
