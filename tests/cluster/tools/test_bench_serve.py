"""``quire bench serve`` in virtual time: its figures, token counts and arrivals."""

import json
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.sim.loop import SimLoop, simulate

from quire.cluster.tools.bench.serving.answer import (
    Answer,
    Form,
    RequestFailed,
    encode,
    forms,
    probe_of,
)
from quire.cluster.tools.bench.serving.command import choose_form
from quire.cluster.tools.bench.serving.dataset import Prompt
from quire.cluster.tools.bench.serving.figures import details, figures
from quire.cluster.tools.bench.serving.load import Load, run
from quire.worker.request.errors import ConfigError, QuireError

Events = Sequence[tuple[float, int]]
"""For each chunk the seconds since the request and its number of tokens."""


def event(text: str = "", **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": more.pop("finish", None)}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def last(num_output: int, **more: Any) -> bytes:
    usage = {"prompt_tokens": 10, "completion_tokens": num_output, **more}
    return (
        b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    )


def fed(*pieces: tuple[float, bytes], keeps_text: bool = False) -> Answer:
    answer = Answer(keeps_text=keeps_text)
    for now_s, data in pieces:
        answer.feed(data, now_s)
    answer.close()
    return answer


def recorded(rng: np.random.Generator) -> Events:
    """A recorded answer of up to 20 chunks with one to five tokens each."""
    times = np.cumsum(rng.exponential(0.05, size=rng.integers(1, 21)))
    return [(float(time), int(rng.integers(1, 6))) for time in times]


def answer_of(sent_s: float, events: Events) -> Answer:
    answer, total = Answer(due_s=sent_s, started_s=sent_s, sent_s=sent_s), 0
    for time_s, count in events:
        total += count
        usage = {"prompt_tokens": 10, "completion_tokens": total}
        answer.feed(event(" word" * count, usage=usage), sent_s + time_s)
    answer.feed(last(total, prompt_tokens_details={"cached_tokens": 4}), sent_s + time_s + 0.001)
    answer.close()
    return answer


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_a_plain_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    runs = [(float(rng.uniform(0, 3)), recorded(rng)) for _ in range(40)]
    load = Load(answers=[answer_of(*each) for each in runs], begin_s=0.0, duration_s=8.0)
    found = figures(
        load,
        metrics=("ttft", "tpot", "itl", "e2el"),
        percentiles=(50, 99),
        goodput={"ttft": 60, "tpot": 20},
    )

    ttft = np.array([events[0][0] for _, events in runs])
    e2el = np.array([events[-1][0] for _, events in runs])
    num = np.array([sum(count for _, count in events) for _, events in runs])
    tpot = (e2el - ttft)[num > 1] / (num[num > 1] - 1)
    itl: list[float] = []
    for _, events in runs:
        itl += [0.0] * (events[0][1] - 1)
        itl += [(b - a) / count for (a, _), (b, count) in pairwise(events) for _ in range(count)]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", np.array(itl)), ("e2el", e2el)):
        assert found[f"mean_{name}_ms"] == pytest.approx(1000 * values.mean())
        assert found[f"std_{name}_ms"] == pytest.approx(1000 * values.std())
        assert found[f"median_{name}_ms"] == pytest.approx(1000 * np.median(values))
        assert found[f"p99_{name}_ms"] == pytest.approx(1000 * np.percentile(values, 99))
    each_tpot = np.divide(e2el - ttft, num - 1, out=np.zeros(len(num)), where=num > 1)
    good = np.sum((ttft <= 0.06) & (each_tpot <= 0.02))
    assert found["request_goodput"] == pytest.approx(good / 8)
    assert found["total_token_throughput"] == pytest.approx((num.sum() + 400) / 8)
    assert (found["completed"], found["total_cached_tokens"]) == (40, 160)
    assert found["cached_token_rate"] == pytest.approx(0.4)
    begin = min(sent for sent, _ in runs)
    seconds = np.zeros(20)
    for sent, events in runs:
        for time, count in events:
            seconds[int(sent + time - begin)] += count
    assert found["max_output_tokens_per_s"] == seconds.max()
    moments = [sent for sent, _ in runs]
    most = max(
        sum(sent <= moment < sent + events[-1][0] for sent, events in runs) for moment in moments
    )
    assert found["max_concurrent_requests"] == most


def test_gaps_of_an_answer_add_up_to_the_time_behind_its_first_token() -> None:
    answer = answer_of(5.0, [(1.0, 3), (2.0, 1), (5.0, 4)])
    assert answer.itls_s.tolist() == [0.0, 0.0, 1.0, 0.75, 0.75, 0.75, 0.75]
    assert sum(answer.itls_s) == answer.latency_s - answer.ttft_s


def test_names_of_the_result_are_those_of_vllm_bench_serve() -> None:
    """Users' scripts read these names, which are copied from one of vLLM's result files."""
    names = (
        "duration completed failed total_input_tokens total_output_tokens request_throughput "
        "request_goodput output_throughput total_token_throughput max_output_tokens_per_s "
        "max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms "
        "median_tpot_ms std_tpot_ms p99_tpot_ms p99.9_itl_ms mean_itl_ms p90_e2el_ms"
    )
    load = Load(answers=[answer_of(0, [(1.0, 2)])], begin_s=0, duration_s=2)
    found = figures(
        load, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(90, 99, 99.9), goodput={}
    )
    assert found.keys() >= set(names.split())
    lists = "input_lens output_lens ttfts itls latencies start_times generated_texts errors"
    assert details(load).keys() >= set(lists.split())


def test_a_load_of_failures_alone_has_figures_too() -> None:
    failed = Answer(failure=RequestFailed("HTTP 500"))
    load = Load(answers=[failed, failed], begin_s=0, duration_s=1)
    found = figures(load, metrics=("ttft", "itl"), percentiles=(99,), goodput={"ttft": 1})
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 2, 0)
    assert found["errors_by_kind"] == {"HTTP 500": 2}
    assert details(load)["ttfts"] == [0.0, 0.0]


def test_a_stream_reads_the_same_however_its_bytes_are_cut() -> None:
    events = [event(" wörld", usage={"completion_tokens": n}) for n in (1, 3, 4)]
    data = b": a comment\r\n\r\n" + b"".join(events) + last(4)
    for size in (1, 2, 7, len(data)):
        pieces = [(float(i), data[i : i + size]) for i in range(0, len(data), size)]
        answer = fed(*pieces, keeps_text=True)
        assert list(answer.counts) == [1, 2, 1]
        assert "".join(answer.text) == " wörld wörld wörld"
        assert (answer.num_prompt, answer.num_output) == (10, 4)


def test_a_chunk_is_a_token_where_the_server_counts_only_at_the_end() -> None:
    answer = fed((1, event(" a b")), (2, event(" c", finish="length")), (3, last(3)))
    assert (list(answer.counts), answer.num_tokens, answer.is_counted) == ([1, 1], 3, False)
    # Usage in the last chunk with text is also the total.
    answer = fed(
        (1, event(" a b")), (2, event(" c", finish="stop", usage={"completion_tokens": 3}))
    )
    assert (list(answer.counts), answer.num_tokens) == ([1, 1], 3)


def test_a_chats_role_is_no_token_and_thoughts_and_calls_are() -> None:
    def delta(now_s: float, **fields: Any) -> tuple[float, bytes]:
        choice = {"delta": fields, "finish_reason": None}
        return now_s, b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"

    answer = fed(
        delta(1, role="assistant", content=""),
        delta(2, reasoning_content="so"),
        delta(3, content="it"),
        delta(4, tool_calls=[{"function": {"arguments": "{"}}]),
        (5, b"data: [DONE]\n"),
    )
    assert list(answer.times) == [2, 3, 4]
    assert answer.num_tokens == 3


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (event(" a"), "cut off"),
        (b"data: [DONE]\n", "no token"),
        (
            b'data: {"error": {"type": "overloaded", "message": "x"}}\n',
            "error in the stream: overl",
        ),
        (b'data: {"error": "x"}\n', "error in the stream: unnamed"),
        (b"data: {\n", "no chunk of a completion"),
        (b"data: []\n", "no chunk of a completion"),
        (b"data: " + b"[" * 100_000 + b"\n", "no chunk of a completion"),
        (b'data: {"choices": {"a": 1}}\n', "no chunk of a completion"),
        (b'data: {"choices": [3]}\n', "no chunk of a completion"),
        (b'data: {"choices": [], "usage": {"prompt_tokens": "x"}}\n', "no chunk of a completion"),
        (event("a", usage={"completion_tokens": 2**70}), "no chunk of a completion"),
        (b"x" * (1 << 20) + b"x", "no stream of events"),
    ],
)
def test_a_bad_stream_fails_by_kind(data: bytes, kind: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        fed((1.0, data))
    assert failed.value.kind.startswith(kind)


class Slow:
    """A server that takes ``takes_s`` for the first token of each answer, in virtual time."""

    def __init__(self, loop: SimLoop, takes_s: float) -> None:
        self._loop, self._takes_s = loop, takes_s
        self.sent_s: list[float] = []
        self.num_now = self.most = 0

    async def stream(self, body: bytes) -> AsyncGenerator[bytes]:
        self.sent_s.append(self._loop.time())
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        await until(self._loop, self._takes_s)
        if body == b"bad":
            self.num_now -= 1
            raise RequestFailed("HTTP 503", "busy")
        yield event(" a", finish="length") + last(1)
        self.num_now -= 1


async def until(loop: SimLoop, seconds: float) -> None:
    future = loop.create_future()
    loop.call_later(seconds, future.set_result, None)
    await future


def loaded(
    bodies: Sequence[bytes],
    at_s: Sequence[float],
    *,
    takes_s: float,
    max_concurrency: int | None = None,
    clock: Callable[[SimLoop], Callable[[], float]] = lambda loop: loop.time,
) -> tuple[Load, Slow]:
    servers: list[Slow] = []

    async def main(loop: SimLoop) -> Load:
        servers.append(Slow(loop, takes_s))
        return await run(
            bodies,
            at_s,
            servers[0],
            max_concurrency=max_concurrency,
            keeps_text=False,
            clock=clock(loop),
            sleep=lambda seconds: until(loop, seconds),
        )

    return simulate(main, seed=1), servers[0]


def test_slow_answers_do_not_slow_arrivals() -> None:
    at_s = [0.5 * i for i in range(20)]
    load, server = loaded([b"x"] * 20, at_s, takes_s=60)
    assert server.sent_s == pytest.approx(at_s)
    assert server.most == 20
    assert load.duration_s == pytest.approx(69.5)
    assert max(load.late_s) == pytest.approx(0)
    assert [answer.ttft_s for answer in load.answers] == pytest.approx([60] * 20)


def test_what_is_held_back_in_the_client_is_its_queue_time_and_not_the_servers() -> None:
    load, server = loaded([b"x"] * 6, [0.0] * 6, takes_s=10, max_concurrency=2)
    assert server.most == 2
    assert sorted(answer.queued_s for answer in load.answers) == pytest.approx(
        [0, 0, 10, 10, 20, 20]
    )
    assert [answer.ttft_s for answer in load.answers] == pytest.approx([10] * 6)


def test_failures_stop_nobody() -> None:
    load, _ = loaded([b"x", b"bad", b"x", b"bad"], [0.0] * 4, takes_s=1)
    assert load.failures == {"HTTP 503": 2}
    assert sum(answer.is_complete for answer in load.answers) == 2


def test_a_client_that_is_kept_from_running_says_by_how_much() -> None:
    """From the third second on the loop wakes half a second later than planned."""

    def clock(loop: SimLoop) -> Callable[[], float]:
        return lambda: loop.time() + (0.5 if loop.time() > 3 else 0)

    load, _ = loaded([b"x", b"x"], [0.0, 3.2], takes_s=1, clock=clock)
    assert max(load.lags_s) == pytest.approx(0.5, abs=0.011)
    assert sum(lag > 0.1 for lag in load.lags_s) == 1
    assert max(load.late_s) == pytest.approx(0.5, abs=0.011)


IDS = Prompt(content=np.array([7, 900]), max_tokens=3, is_made_up=True)
TEXT = Prompt(content="hello", max_tokens=3)
TALK = Prompt(content=[{"role": "system", "content": "x"}], max_tokens=3)
NO_MODEL: dict[str, Any] = {"model": "m", "more": {"ignore_eos": True}}


def test_a_body_says_what_it_is_asked_to() -> None:
    body = json.loads(encode(IDS, Form(True, "continuous"), is_chat=False, **NO_MODEL))
    assert body == {
        "model": "m",
        "prompt": [7, 900],
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    words = json.loads(encode(IDS, Form(False, "none"), is_chat=True, **NO_MODEL))
    assert "stream_options" not in words
    assert len(words["messages"][0]["content"].split()) == 2
    odd = Prompt(content="a\udcff", max_tokens=1)
    assert encode(odd, Form(False, "none"), is_chat=False, **NO_MODEL).isascii()
    talk = json.loads(encode(TALK, Form(False, "end"), is_chat=True, **NO_MODEL))
    assert talk["messages"] == TALK.content


def chosen(prompts: Sequence[Prompt], takes: Callable[[dict[str, Any]], bool]) -> Form:
    """The form of requests that is chosen for a server that answers 400 to all but ``takes``."""

    class Server:
        async def stream(self, body: bytes) -> AsyncGenerator[bytes]:
            if not takes(json.loads(body)):
                raise RequestFailed("HTTP 400", "HTTP 400: no such field")
            yield event(" a") + last(1)

    async def main(loop: SimLoop) -> Form:
        probe = probe_of(prompts)
        return await choose_form(
            Server(),
            forms(prompts, is_chat=False),
            lambda form: encode(probe, form, model="m", is_chat=False, more={}),
        )

    return simulate(main, seed=1)


def test_a_server_is_asked_in_the_best_way_that_it_takes() -> None:
    assert chosen([IDS], lambda body: True) == Form(True, "continuous")
    assert chosen([TEXT], lambda body: True) == Form(False, "continuous")
    is_text: Callable[[dict[str, Any]], bool] = lambda body: isinstance(body["prompt"], str)  # noqa: E731
    assert chosen([IDS], is_text) == Form(False, "continuous")
    assert chosen([IDS], lambda body: "continuous" not in str(body)) == Form(True, "end")
    assert chosen([IDS], lambda body: is_text(body) and "stream_options" not in body) == Form(
        False, "none"
    )
    # Token ids from a file are never sent as text.
    given = Prompt(content=np.array([7, 900]), max_tokens=3)
    with pytest.raises(QuireError, match=r"no load was sent: HTTP 400: no such field"):
        chosen([given], is_text)
    with pytest.raises(ConfigError, match=r"token ids: give --endpoint /v1/completions"):
        forms([given], is_chat=True)
    with pytest.raises(ConfigError, match=r"messages: give --backend openai-chat"):
        forms([TEXT, TALK], is_chat=False)


def test_the_probe_has_the_greatest_token_id_and_no_prompts_beginning() -> None:
    probe = probe_of([IDS, Prompt(content=np.array([5, 12]), max_tokens=1)])
    assert isinstance(probe.content, np.ndarray)
    assert set(probe.content.tolist()) == {900}
    assert probe.max_tokens == 1


def test_what_a_server_says_does_a_terminal_no_harm() -> None:
    failure = RequestFailed("error \x1b[2J", "line\r\n" + "x" * 10_000)
    assert failure.kind == "error  [2J"
    assert str(failure).isprintable()
    assert len(str(failure)) == 300
