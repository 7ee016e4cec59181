"""The counts of `bench.served`: tokens of streams however cut, and processes by command."""

from collections.abc import Callable
from types import ModuleType

BenchModule = Callable[[str], ModuleType]

_EVENTS = (
    b'data: {"choices":[{"text":"a"}]}',
    b'data: {"choices":[{"text":"data: {"}]}'.replace(b'data: {"}', b'data: \\"}'),
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}',
    b"data: [DONE]",
)
_STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"".join(
    b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event) for event in _EVENTS
)


def test_a_stream_is_counted_however_it_is_cut(bench_module: BenchModule) -> None:
    client = bench_module("served.client")
    whole = _STREAM + b"0\r\n\r\n"
    head = len(b"HTTP/1.1 200 ")
    for size in (1, 7, 50, len(whole)):
        answer = client.Answer()
        cuts = [whole[:head]] + [whole[at : at + size] for at in range(head, len(whole), size)]
        for now_s, data in enumerate(cuts):
            assert not answer.is_over
            answer.feed(data, float(now_s))
        assert (answer.is_over, answer.num_tokens, len(answer.times)) == (True, 2, 2)
        assert not answer.error


def test_a_refusal_is_an_error(bench_module: BenchModule) -> None:
    answer = bench_module("served.client").Answer()
    answer.feed(b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy", 0.0)
    assert answer.is_over
    assert "429" in answer.error


def test_processes_have_roles(bench_module: BenchModule) -> None:
    role_of = bench_module("served.servers").role_of
    assert role_of("ray::ServeReplica:quire:Gateway") == "gateway"
    assert role_of("python -m quire serve model") == "other"


def test_what_is_kept_is_a_share_of_offline(bench_module: BenchModule) -> None:
    report = bench_module("served.report")

    def run(way: str, tokens_per_s: float) -> object:
        return report.Run(model="S", load="8", engine="quire", way=way, tokens_per_s=tokens_per_s)

    offline = run(report.OFFLINE, 200)
    first, *_ = report.tables([offline, run("http", 150), run("http", 170), run("http", 20)])
    assert "| S | 8 | 200 | 150 | 75% |" in first
