"""A request's tokens depend on model, prompt, parameters and seed only: in bfloat16, sampled.

The same holds in int8 and w4. In bfloat16, logits that differ in a last bit soon give other tokens,
so equal tokens show that all logits had equal bits. The native library guarantees that. Plain
PyTorch, whose products change with the number of rows, guarantees it in float32 only.
"""

from dataclasses import replace

import pytest

from quire import demo_model
from quire.kernels.native import library as native
from quire.llm import LLM, SamplingParams

Settings = dict[str, object]

KINDS: dict[str, Settings] = {
    "bfloat16": {},
    "int8": {"quantization": "int8"},
    "w4": {"quantization": "w4"},
    "int8-with-kv": {"quantization": "int8", "kv_cache_dtype": "int8"},
}

VARIANTS: list[Settings] = [
    {},
    {"max_num_batched_tokens": 40},
    {"block_size": 64},
    {"num_threads": 2},
    {"async_scheduling": True},
    {"scheduling_policy": "fcfs", "max_num_batched_tokens": 130},
]

PARAMS = SamplingParams(temperature=1.2, seed=11, max_tokens=40, ignore_eos=True)

needs_native = pytest.mark.skipif(
    native.library() is None, reason="there is no native library on this machine"
)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Settings:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def expected(kind: Settings) -> list[list[int]]:
    """Tokens of each request alone, on one rank, without prefix caching."""
    with _llm(**kind, enable_prefix_caching=False) as llm:
        return [_tokens(llm, [chat])[0] for chat in _chats()]


@pytest.mark.quick_cells("bfloat16")
@needs_native
def test_in_a_batch_from_the_cache_and_in_chunks(expected: list[list[int]], kind: Settings) -> None:
    for settings in VARIANTS:
        with _llm(**kind, **settings) as llm:
            assert _tokens(llm, _chats()) == expected
            assert _tokens(llm, _chats()) == expected  # From the cache.
            assert llm.engine.stats().num_hit_tokens > 0


@pytest.mark.quick_cells("bfloat16", "int8-with-kv-False")
@needs_native
@pytest.mark.parametrize("is_async", [False, True])
def test_when_preempted(expected: list[list[int]], kind: Settings, is_async: bool) -> None:
    with _llm(**kind, num_blocks=24, max_model_len=384, async_scheduling=is_async) as llm:
        assert _tokens(llm, _chats()) == expected
        assert llm.engine.stats().num_preemptions > 0


@pytest.mark.quick_cells("bfloat16-2-False")
@needs_native
@pytest.mark.parametrize(("ranks", "is_async"), [(2, False), (2, True), (4, False)])
def test_on_any_number_of_ranks(
    expected: list[list[int]], kind: Settings, ranks: int, is_async: bool
) -> None:
    with _llm(**kind, tensor_parallel_size=ranks, async_scheduling=is_async) as llm:
        assert _tokens(llm, _chats()) == expected


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("ranks", [1, 2])
def test_beside_requests_with_other_parameters(ranks: int) -> None:
    """Greedy rows skip logits, others do not; neither may depend on the other."""
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    params = [
        greedy,
        PARAMS,
        replace(greedy, logprobs=2),
        replace(greedy, repetition_penalty=1.3),
        greedy,
        replace(greedy, min_tokens=30, max_tokens=30),
    ]
    with _llm(enable_prefix_caching=False) as llm:
        alone = [_tokens(llm, [chat], [one])[0] for chat, one in zip(_chats(), params, strict=True)]
    # At least six greedy rows in a step, since fewer do not skip logits.
    with _llm(tensor_parallel_size=ranks, max_num_seqs=18) as llm:
        assert _tokens(llm, 3 * _chats(), 3 * params) == 3 * alone
        assert _tokens(llm, 3 * _chats()[::-1], 3 * params[::-1]) == 3 * alone[::-1]


def _chats() -> list[list[dict[str, str]]]:
    system = {"role": "system", "content": demo_model.SYSTEM_PROMPT}
    return [[system, {"role": "user", "content": text}] for text in demo_model.QUESTIONS[:6]]


def _llm(**settings: object) -> LLM:
    base = {"dtype": "bfloat16", "num_blocks": 256, "num_threads": 1, "max_num_seqs": 16}
    return LLM(demo_model.PATH, **(base | settings))  # type: ignore[arg-type]


def _tokens(
    llm: LLM,
    chats: list[list[dict[str, str]]],
    params: SamplingParams | list[SamplingParams] = PARAMS,
) -> list[list[int]]:
    outputs = llm.chat(chats, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
