"""The order in which constraints are compiled, and the share of each tenant."""

import threading
from collections import Counter
from collections.abc import Callable

from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.compile_queue import CompileQueue, CompileThreads
from quire.worker.text.grammar.kept import Kept

SHORT, LONG = 100, 4_000


class Bench:
    """A queue with one worker, on a clock that the work advances."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queue = CompileQueue(clock=lambda: self.now_s)
        self.done: list[tuple[str, float]] = []

    def put(self, name: str, took_s: float, *, tenant: str = "", num_chars: int = SHORT) -> None:
        self.queue.put(self._work(name, took_s), tenant=tenant, num_chars=num_chars)

    def run(self, until: str) -> float:
        """Works until ``until`` is done; returns the time."""
        while True:
            turn = self.queue.take()
            if turn is None:
                pause_s = self.queue.pause_s()
                assert pause_s is not None
                self.now_s += pause_s
                continue
            key, work = turn
            began_s = self.now_s
            work()
            self.queue.finished(key, self.now_s - began_s)
            if self.done[-1][0] == until:
                return self.now_s

    def _work(self, name: str, took_s: float) -> Callable[[], None]:
        def work() -> None:
            self.now_s += took_s
            self.done.append((name, self.now_s))

        return work


def test_a_tenants_long_queue_keeps_no_other_one_waiting() -> None:
    bench = Bench()
    for _ in range(50):
        bench.put("a", 0.4, tenant="A", num_chars=LONG)
    bench.run("a")
    bench.put("b", 0.007, tenant="B")
    assert bench.run("b") <= 0.4 + 0.007


def test_what_is_long_keeps_nothing_short_waiting_where_there_are_no_tenants() -> None:
    bench = Bench()
    for _ in range(50):
        bench.put("long", 0.4, num_chars=LONG)
    bench.run("long")
    bench.put("short", 0.007)
    assert bench.run("short") <= 0.4 + 0.007


def test_a_tenant_that_compiles_what_takes_long_has_a_share_of_a_core() -> None:
    bench = Bench()
    for number in range(21):
        bench.put(str(number), 0.5, tenant="A", num_chars=LONG)
    assert 0.2 < 10.0 / bench.run("20") < 0.3


def test_honest_constraints_are_compiled_one_behind_the_other_without_a_pause() -> None:
    bench = Bench()
    for number in range(100):
        bench.put(str(number), 0.01)
    assert bench.run("99") < 1.0001


def test_one_constraint_of_a_tenant_is_compiled_at_a_time_and_others_beside_it() -> None:
    threads = CompileThreads(2)
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert may_end.wait(60)
        return "slow"

    text = Constraint("regex", "a")
    first = threads.submit(slow, text, tenant="A")
    second = threads.submit(lambda: "second", text, tenant="A")
    assert begun.wait(60)
    assert threads.submit(lambda: "other", text, tenant="B").result(60) == "other"
    assert not second.done()
    may_end.set()
    assert (first.result(60), second.result(60)) == ("slow", "second")
    failing = threads.submit(lambda: 1 // 0, text, tenant="A")
    assert isinstance(failing.exception(60), ZeroDivisionError)
    threads.close()


def test_what_is_kept_for_a_tenant_no_other_one_finds_or_drives_out() -> None:
    kept: Kept[str] = Kept()
    texts = [Constraint("regex", f"a{number}") for number in range(1_000)]
    kept.put("A", texts[0], "refused")
    assert kept.get("B", texts[0]) is None
    for text in texts:
        kept.put("B", text, "")
    assert kept.get("A", texts[0]) == "refused"
    found = Counter(kept.get("B", text) for text in texts)
    assert found[""] == 255
    large = [Constraint("regex", f"{number}" + "a" * 500_000) for number in range(30)]
    for text in large:
        kept.put("C", text, "")
    assert sum(kept.get("C", text) is not None for text in large) == 16
    for text in texts[:30]:
        kept.put("C", text, "", took_s=1.0)
    assert sum(kept.get("C", text) is not None for text in texts[:30]) == 8
    assert kept.get("A", texts[0]) == "refused"
