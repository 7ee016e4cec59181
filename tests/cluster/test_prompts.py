"""The gateway's checks and tokenization of prompts."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
import tokenizers

from quire.cluster.errors import DeadlineExceeded, Overloaded
from quire.cluster.gateway.prompts import Prompts, as_ids
from quire.v1 import inference_pb2 as pb
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.request.errors import ContextExceeded, InvalidRequest
from quire.worker.request.limits import RequestLimits
from quire.worker.request.request import Chat, Text, Tokens
from quire.worker.text.template.process import TemplateLimits
from quire.worker.text.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

LIMITS = RequestLimits(vocab_size=280, max_model_len=1000, reason="of a test")
CHAT = (Chat([{"role": "user", "content": "the cat"}]),)


class Watched(Tokenizer):
    """A tokenizer that counts its texts, and encodes when the test allows it."""

    def __init__(self, tokenizer: Tokenizer, *, may_encode: bool = True) -> None:
        super().__init__(tokenizer._backend, chat_template="{{ messages[0].content }}")
        self.given: list[int] = []
        self.now = self.most = 0
        self.go = threading.Event()
        if may_encode:
            self.go.set()
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            self.given.append(len(text))
            self.now += len(text)
            self.most = max(self.most, self.now)
        self.go.wait()
        try:
            return super().encode(text, add_special_tokens=add_special_tokens)
        finally:
            with self._lock:
                self.now -= len(text)


@pytest.fixture
def make() -> Callable[..., Prompts]:
    from prometheus_client import CollectorRegistry

    def make(tokenizer: Tokenizer, **config: Any) -> Prompts:
        given = {
            "max_tokenizing_bytes": 100_000,
            "max_waiting": 100,
            "template": TemplateLimits(),
            "registry": CollectorRegistry(),
            "refused": lambda: None,
        }
        return Prompts(tokenizer, **{**given, **config})

    return make


async def test_what_is_too_long_by_its_length_is_never_tokenized(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    watched = Watched(tokenizer)
    assert watched.bound is not None
    too_long = "x" * (watched.bound.max_chars * 1000)
    prompts = make(watched)
    for span in (Text(too_long), Chat([{"role": "user", "content": too_long}])):
        with pytest.raises(ContextExceeded, match=r"1000 tokens or more and max_model_len is 1000"):
            await prompts.tokenize((span,), limits=LIMITS)
    with pytest.raises(ContextExceeded, match="prompt has 5000 tokens and"):
        await prompts.tokenize((Tokens([9] * 5000),), limits=LIMITS)
    assert watched.given == []
    # Without limits: a call that counts tokens.
    assert len(await prompts.tokenize((Text(too_long),))) == len(tokenizer.encode(too_long))


async def test_what_may_fit_is_tokenized(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    longest = max(tokenizer._backend.get_vocab(), key=len).replace("Ġ", " ")
    text = longest * 999
    assert tokenizer.encode(text)
    assert await make(tokenizer).tokenize((Text(text),), limits=LIMITS) == tokenizer.encode(text)


async def test_a_long_text_is_given_up_once_its_beginning_has_too_many_tokens(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    watched = Watched(tokenizer)
    watched.bound = None  # As for a tokenizer without a known bound.
    with pytest.raises(ContextExceeded, match="in the first 65536 alone 65536 tokens"):
        await make(watched).tokenize((Text("z" * 5_000_000),), limits=LIMITS)
    assert watched.given == [65_536]


async def test_no_more_text_than_the_budget_is_tokenized_at_a_time(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    watched = Watched(tokenizer, may_encode=False)
    prompts = make(watched, max_tokenizing_bytes=100_000)
    tasks = [
        asyncio.create_task(prompts.tokenize((Text("cat " * 7_500),))) for _ in range(8)
    ]  # 30 kB each
    while prompts.budget.waiting < 5 * 30_000:
        await asyncio.sleep(0.001)
    assert prompts.budget.held == 90_000
    watched.go.set()
    expected = tokenizer.encode("cat " * 7_500)
    assert await asyncio.gather(*tasks) == [expected] * 8
    assert watched.most <= 100_000
    assert (prompts.budget.held, prompts.waiting.num) == (0, 0)


async def test_long_texts_go_one_by_one_and_leave_room_for_others(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    watched = Watched(tokenizer, may_encode=False)
    prompts = make(watched)
    long = [asyncio.create_task(prompts.tokenize((Text("x" * 200_000),))) for _ in range(3)]
    while not watched.given:
        await asyncio.sleep(0.001)
    other = asyncio.create_task(prompts.tokenize((Text("x" * 40_000),)))
    while len(watched.given) < 2:
        await asyncio.sleep(0.001)
    assert watched.given == [200_000, 40_000]
    watched.go.set()
    await asyncio.gather(*long, other)
    assert watched.most <= 240_000


async def test_a_client_that_leaves_does_not_free_what_its_thread_still_uses(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    watched = Watched(tokenizer, may_encode=False)
    prompts = make(watched)
    task = asyncio.create_task(prompts.tokenize((Text("x" * 50_000),)))
    while not watched.given:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert prompts.budget.held == 50_000
    watched.go.set()
    while prompts.budget.held:
        await asyncio.sleep(0.001)


async def test_a_prompt_waits_for_its_turn_no_longer_than_its_deadline(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    watched = Watched(tokenizer, may_encode=False)
    prompts = make(watched, max_tokenizing_bytes=50_000, clock=lambda: 0.0, max_waiting=2)
    first = asyncio.create_task(prompts.tokenize((Text("x" * 20_000),)))
    second = asyncio.create_task(prompts.tokenize((Text("x" * 25_000),)))
    while len(watched.given) < 2:
        await asyncio.sleep(0.001)
    with pytest.raises(Overloaded, match="2 prompts are being tokenized, --max-inflight is 2"):
        await prompts.tokenize((Text("x" * 20_000),))
    prompts.waiting._shares.limit = 3
    with pytest.raises(DeadlineExceeded):
        await prompts.tokenize((Text("x" * 20_000),), deadline_s=0.01)
    watched.go.set()
    await asyncio.gather(first, second)
    assert prompts.budget.held == 0


async def test_chats_wait_while_a_template_runs_and_the_loop_does_not(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    spinning = Tokenizer(tokenizer._backend, chat_template=endless)
    prompts = make(spinning, template=TemplateLimits(timeout_s=0.5))
    task = asyncio.create_task(prompts.tokenize(CHAT))
    num_turns = 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.5 s"):
        await task
    assert num_turns > 5


async def test_the_loop_goes_on_while_another_process_encodes(
    make: Callable[..., Prompts],
) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    pattern = tokenizers.Regex("(a+)+b")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    prompts = make(Tokenizer(backend))
    assert await prompts.tokenize((Text("ab"),)) == [0, 1]  # The process has started.
    task = asyncio.create_task(prompts.tokenize((Text("a" * 40),)))
    num_turns = 0
    while not task.done():
        num_turns += 1
        await asyncio.sleep(0.001)
    with pytest.raises(InvalidRequest, match="tokenizer of the model cannot encode the text"):
        await task
    assert num_turns > 5
    assert prompts.budget.held == 0


async def test_many_ids_are_the_same_in_pieces() -> None:
    ids = list(range(200_000))
    assert (await as_ids(ids) == as_token_ids(ids)).all()


async def test_lists_that_no_request_may_have_are_refused_over_grpc(start_cluster: Any) -> None:
    turns = [pb.ChatMessage(role="user")] * 10_001
    stops = pb.SamplingParams(stop=["a"] * 2000)
    async with start_cluster(num_groups=1) as cluster:
        for request, words in (
            (pb.GenerateRequest(chat=pb.Chat(messages=turns)), "10001 messages: at most"),
            (pb.GenerateRequest(text="x", sampling=stops), "stop has 2000: at most"),
            (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9] * 500)), "prompt has 500 tokens"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as raised:
                async for _ in cluster.inference.Generate(request):
                    pass
            assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_large_messages_are_refused_while_others_hold_all_memory(start_cluster: Any) -> None:
    request = pb.TokenizeRequest(text="the cat " * 20_000)
    async with start_cluster(num_groups=1, max_body_bytes=200_000) as cluster:
        with await cluster.models.bodies.take(100_000):
            with pytest.raises(grpc.aio.AioRpcError, match="take all memory") as raised:
                await cluster.inference.Tokenize(request)
            assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await cluster.inference.Tokenize(request)
        assert list(answer.token_ids) == cluster.model.tokenizer.encode(request.text)
        back = await cluster.inference.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))
        assert back.text == request.text
        assert cluster.models.bodies.held == 0


async def test_spans_follow_on_from_each_other(
    make: Callable[..., Prompts], tokenizer: Tokenizer
) -> None:
    spans = (Text("the cat"), Tokens([9, 9]), Text("sat", add_special_tokens=False))
    sat = tokenizer.encode("sat", add_special_tokens=False)
    assert await make(tokenizer).tokenize(spans) == [*tokenizer.encode("the cat"), 9, 9, *sat]
