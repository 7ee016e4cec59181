"""The thinking budget is exact in a batch, when preempted or resumed, and with a constraint."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.worker.engine_requests import request, run

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.spelling import spell_out
from quire.worker.request.structured import Constraint
from quire.worker.text.reasoning import ReasoningFormat
from quire.worker.text.tokenizer import Tokenizer

BEGIN, END = 3, 4
MARKS = ReasoningFormat(name="x", opens="<|user|>", closes="<|assistant|>", signs=())
PROMPT = [5, 31, 77]


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(demo_model.PATH, dtype="float32", num_blocks=128, num_threads=1) as engine:
        yield engine


def bounded(budget: int, seed: int = 3, marks: Sequence[int] = (END,)) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        temperature=1.2,
        max_tokens=30,
        ignore_eos=True,
        thinking_token_budget=budget,
        thinking_token_ids=marks,
    )


def tokens(llm: LLM, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    output = llm.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0]
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize("budget", [0, 1, 7, 29, 30])
def test_the_end_comes_behind_the_budget_and_only_there_is_the_output_changed(
    demo: LLM, budget: int
) -> None:
    free = tokens(demo, replace(bounded(0), thinking_token_budget=None, thinking_token_ids=None))
    assert END not in free
    cut = tokens(demo, bounded(budget))
    assert cut[:budget] == free[:budget]
    assert cut[budget : budget + 1] == [END][: 30 - budget]
    # The tokens after it are those that follow this prefix without a budget.
    rest = replace(bounded(0), thinking_token_budget=None, thinking_token_ids=None)
    at = [*PROMPT, *cut[: budget + 1]]
    assert (
        tokens(demo, replace(rest, max_tokens=5), at)[: max(0, 29 - budget)]
        == cut[budget + 1 :][:5]
    )


def test_reasoning_that_begins_or_ends_by_itself(demo: LLM) -> None:
    free = tokens(demo, replace(bounded(0), thinking_token_budget=None, thinking_token_ids=None))
    begins = free[4]
    cut = tokens(demo, bounded(3, marks=(begins, END)))
    assert cut[: 5 + 3] == free[: 5 + 3]
    assert cut[5 + 3] == END
    assert tokens(demo, bounded(3, marks=(BEGIN, END))) == free  # It never begins.
    ends = free[2]
    assert tokens(demo, bounded(3, marks=(ends,))) == free  # It has ended before.


def test_the_end_outweighs_bans_and_biases(demo: LLM) -> None:
    params = replace(
        bounded(4),
        allowed_token_ids=[5, 31],
        bad_words_token_ids=[[END]],
        logit_bias={END: -100.0, 31: 100.0},
        stop_token_ids=[END],
        min_tokens=20,
        repetition_penalty=2.0,
    )
    cut = tokens(demo, params)
    assert {*cut[:4]} <= {5, 31}
    assert cut[4:] == [END]  # END is also a stop token here.


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("is_async", [False, True])
def test_in_a_batch_and_when_preempted(demo: LLM, is_async: bool) -> None:
    params = [replace(bounded(2 * seed, seed), max_tokens=40) for seed in range(9)]
    prompts = [[9 + seed, *PROMPT] for seed in range(9)]
    alone = [tokens(demo, each, prompt) for each, prompt in zip(params, prompts, strict=True)]
    assert [each.index(END) for each in alone] == [2 * seed for seed in range(9)]
    with LLM(
        demo_model.PATH,
        dtype="float32",
        num_blocks=12,
        max_model_len=64,
        num_threads=1,
        async_scheduling=is_async,
    ) as small:
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        together = small.generate(given, params, use_tqdm=False)
        assert small.engine.stats().num_preemptions > 0
    assert [list(each.outputs[0].token_ids) for each in together] == alone


def test_a_resumed_request_goes_on_with_the_same_tokens(demo: LLM) -> None:
    values: dict[str, Any] = {
        "max_tokens": 16,
        "seed": 3,
        "thinking_token_budget": 6,
        "thinking_token_ids": (END,),
    }
    whole = run(demo.engine, request("whole", PROMPT, **values))["whole"].token_ids
    assert whole[6] == END
    cuts = [request(str(cut), PROMPT, resumed=whole[:cut], **values) for cut in range(1, 16)]
    for cut, output in run(demo.engine, *cuts).items():
        assert (*whole[: int(cut)], *output.token_ids) == whole


def test_a_form_is_kept_and_comes_behind_the_end(demo: LLM) -> None:
    grammar = f'start: T <[{END}]> "yes"\nT: /(.|\\n)*/\n'
    params = replace(bounded(5), structured_outputs=Constraint("grammar", grammar), max_tokens=200)
    text = tokens(demo, replace(params, ignore_eos=False, skip_special_tokens=False))
    assert text.index(END) in (5, 6, 7, 8)  # A character that has begun is finished.
    assert demo.get_tokenizer().decode(text[text.index(END) + 1 :]) == "yes"
    forbids = replace(params, structured_outputs=Constraint("regex", "a{9}"), max_tokens=20)
    assert demo.get_tokenizer().decode(tokens(demo, forbids)) == "a" * 9


def test_marks_are_spelled_by_what_the_prompt_has_said() -> None:
    tokenizer = Tokenizer.load(demo_model.PATH)

    def spelled(
        prompt: str, form: ReasoningFormat | None = MARKS, ids: Sequence[int] = ()
    ) -> SamplingParams:
        return spell_out(
            SamplingParams(thinking_token_budget=9, thinking_token_ids=ids),
            ids_of(tokenizer, prompt),
            tokenizer=lambda: tokenizer,
            reasoning=lambda _: form,
            max_model_len=9,
        )[0]

    assert spelled("The sea").thinking_token_ids == (BEGIN, END)
    assert spelled("The sea<|user|>\n").thinking_token_ids == (END,)
    ended = spelled("The sea<|user|> is <|assistant|>\n")
    assert (ended.thinking_token_budget, ended.thinking_token_ids) == (None, ())
    with pytest.raises(InvalidRequest, match="thinking_token_budget=9 is not supported: it is not"):
        spelled("The sea", None)
    several = replace(MARKS, closes="</think>")
    with pytest.raises(InvalidRequest, match="</think> is more than one token"):
        spelled("The sea", several)
    worded = replace(MARKS, opens=f"{MARKS.opens}thought", opens_token=MARKS.opens)
    assert spelled("The sea", worded).thinking_token_ids == (BEGIN, END)
    given = SamplingParams(thinking_token_budget=9, thinking_token_ids=[7])
    assert spelled("a", None, [7]) == given


def ids_of(tokenizer: Tokenizer, prompt: str) -> Any:
    return as_token_ids(tokenizer.encode(prompt))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget=-1 is out of range: 0 or more"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget=1.5"),
        ({"thinking_token_budget": 5}, "thinking_token_budget=5 is not supported: it is not known"),
        (
            {"thinking_token_budget": 5, "thinking_token_ids": [1, 2, 3]},
            "thinking_token_ids has 3: at most 2",
        ),
        (
            {"thinking_token_budget": 5, "thinking_token_ids": [10**6]},
            "1000000 at position 0 of the thinking_token_ids",
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused(demo: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        demo.generate("a", SamplingParams(**params), use_tqdm=False)


def test_an_engine_takes_tokens_only(demo: LLM) -> None:
    with pytest.raises(InvalidRequest, match="is without thinking_token_ids"):
        demo.engine.add_request(request("a", [5], thinking_token_budget=5))
