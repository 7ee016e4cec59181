"""Requests of several LoRA adapters in one engine get their own tokens, and take turns."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from tests.worker.engine_requests import Generate, MakeEngine, range_prompt, request, run

from quire.worker.group_engine import GroupEngine
from quire.worker.parts.adapters import reading
from quire.worker.parts.adapters.slots import TURN_STEPS
from quire.worker.request.errors import InvalidRequest, QueueFull


class NoThread:
    """Reads an adapter in the caller's thread, so that the next step finds it ready."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, read: Callable[[str], Any], digest: str) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(read(digest))
        return done

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.fixture
def make(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[GroupEngine, Any]]:
    """Makes engines with adapters. Unless ``read_adapter`` is given, adapters are read at once, not
    by a thread, with which a test that counts steps would race."""

    def make(**options: Any) -> tuple[GroupEngine, Any]:
        if "read_adapter" not in options:
            monkeypatch.setattr(reading, "ThreadPoolExecutor", NoThread)
        given = {"enable_lora": True, "read_adapter": lambda _: Mock(), "num_blocks": 64}
        return make_engine(**(given | options))

    return make


def named(number: int, prompt: list[int], adapter: str, **params: Any) -> Any:
    return request(f"{number}", prompt, adapter=adapter, **params)


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_twelve_adapters_in_two_slots_all_say_what_each_says_alone(
    make: MakeEngine, generate: Generate, num_ahead: int
) -> None:
    engine, executor = make(
        max_loras=2, max_num_seqs=16, max_num_batched_tokens=64, num_ahead=num_ahead
    )
    prompt = range_prompt(9)
    adapters = ["", *(f"adapter {number}" for number in range(12))]
    ended = run(
        engine,
        *(named(n, prompt, adapter, max_tokens=40) for n, adapter in enumerate(adapters)),
    )
    for number, adapter in enumerate(adapters):
        expected, reason = generate(prompt, max_tokens=40, adapter=adapter, stop=())
        assert list(ended[f"{number}"].token_ids) == expected
        assert ended[f"{number}"].finish_reason == reason
    assert all(len(set(step.adapter_slots_A.tolist()) - {-1}) <= 2 for step in executor.steps)
    assert not any(each.num_cached_tokens for each in ended.values())
    # Each adapter is loaded for a turn, and not for each step.
    num_loads = sum(len(step.adapter_loads) for step in executor.steps)
    assert 12 <= num_loads <= 2 * len(executor.steps) / TURN_STEPS + 12


def test_the_same_prompt_shares_blocks_within_an_adapter_only(make: MakeEngine) -> None:
    engine, _ = make()
    prompt = range_prompt(9)
    first = run(engine, named(0, prompt, "red"))
    others = run(engine, named(1, prompt, "blue"), named(2, prompt, ""))
    again = run(engine, named(3, prompt, "red"))
    assert [each["0"].num_cached_tokens for each in (first,)] == [0]
    assert [others[name].num_cached_tokens for name in ("1", "2")] == [0, 0]
    assert again["3"].num_cached_tokens == 8
    assert again["3"].token_ids == first["0"].token_ids


def test_requests_behind_one_whose_adapter_has_no_slot_go_on(make: MakeEngine) -> None:
    engine, executor = make(max_loras=1, scheduling_policy="fcfs")
    engine.add_request(named(0, [2], "red", max_tokens=30))
    engine.step()
    for number, adapter in enumerate(["blue", "red", ""], 1):
        engine.add_request(named(number, [2, number], adapter, max_tokens=30))
    engine.step()
    engine.step()
    assert len(executor.steps[-1].seq_lens_B) == 3
    assert engine.stats().num_waiting == 1


def test_an_adapter_waits_for_no_other_ones_long_outputs(make: MakeEngine) -> None:
    engine, _ = make(max_loras=1)
    engine.add_request(named(0, [2], "red", max_tokens=200))
    for _ in range(3):
        engine.step()
    engine.add_request(named(1, [2], "blue", max_tokens=2))
    ended = []
    for _ in range(2 * TURN_STEPS):
        ended += [out.request_id for out in engine.step() if out.finish_reason]
    assert ended == ["1"]


def test_an_urgent_request_gets_its_adapter_before_others_that_wait(make: MakeEngine) -> None:
    engine, executor = make(max_loras=1)
    engine.check_request(named(9, [2], "blue"))
    for number in range(4):
        engine.check_request(named(9, [2], f"{number}"))
        engine.add_request(named(number, [2], f"{number}", max_tokens=90))
    engine.step()
    engine.add_request(named(4, [2], "blue", max_tokens=90, priority=-1))
    for _ in range(TURN_STEPS + 1):
        engine.step()
    assert executor.adapters == {0: "blue"}


def test_a_low_priority_with_all_blocks_does_not_keep_others_waiting(make: MakeEngine) -> None:
    engine, _ = make(max_loras=1, max_num_seqs=1)
    requests = [named(n, [2], "red", max_tokens=40, priority=1) for n in range(2)]
    engine.add_request(requests[0])
    while not engine.step():
        pass
    ended = run(engine, named(2, [2], "blue", max_tokens=40, priority=-1), requests[1])
    assert sorted(ended) == ["0", "1", "2"]


def test_a_preempted_request_comes_back_to_its_adapter(
    make: MakeEngine, generate: Generate
) -> None:
    engine, _ = make(max_loras=1, num_blocks=12)
    requests = [named(n, [2 + n], "red" if n % 2 else "blue", max_tokens=30) for n in range(4)]
    ended = run(engine, *requests)
    for number in range(4):
        adapter = "red" if number % 2 else "blue"
        expected, _ = generate([2 + number], max_tokens=30, adapter=adapter, stop=())
        assert list(ended[f"{number}"].token_ids) == expected
    assert engine.stats().num_preemptions > 0


def test_an_aborted_request_leaves_no_adapter_behind(make: MakeEngine, generate: Generate) -> None:
    engine, executor = make(max_loras=1)
    for number, adapter in enumerate(["red", "blue", "blue"]):
        engine.add_request(named(number, [2, 3], adapter, max_tokens=50))
    engine.step()
    assert engine.abort("1")
    assert engine.abort("0")
    tokens = [token for _ in range(60) for out in engine.step() for token in out.token_ids]
    assert tokens == generate([2, 3], max_tokens=50, adapter="blue", stop=())[0]
    assert not engine.has_work
    assert executor.adapters == {0: "blue"}


def test_others_go_on_while_an_adapter_is_read(make: MakeEngine) -> None:
    is_read = threading.Event()

    def read(_: str) -> Any:
        is_read.wait()
        return Mock()

    engine, _ = make(read_adapter=read)
    engine.add_request(named(0, [2], "red"))
    engine.add_request(request("1", [2, 3]))
    ended = [out.request_id for _ in range(8) for out in engine.step() if out.finish_reason]
    assert ended == ["1"]
    assert engine.stats().num_waiting == 1
    is_read.set()
    assert list(run(engine)) == ["0"]


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(make: MakeEngine) -> None:
    def read(digest: str) -> Any:
        if digest == "bad":
            raise InvalidRequest("adapter: it is torn", param="adapter")
        if digest == "broken":
            raise ZeroDivisionError
        return Mock()

    engine, _ = make(read_adapter=read)
    ended = run(engine, *(named(n, [2], each) for n, each in enumerate(["bad", "broken", "good"])))
    assert str(ended["0"].error) == "adapter: it is torn"
    assert isinstance(ended["1"].error, InvalidRequest)
    assert "ZeroDivisionError" in str(ended["1"].error)
    assert (ended["2"].error, ended["2"].finish_reason) == (None, "length")
    with pytest.raises(InvalidRequest, match="torn"):
        engine.check_request(named(3, [2], "bad"))


def test_adapters_stay_ready_as_far_as_there_is_room(make: MakeEngine) -> None:
    held = {name: Mock() for name in "abcd"}
    engine, _ = make(max_loras=2, max_cpu_loras=2, read_adapter=held.__getitem__)
    run(engine, *(named(n, [2], name) for n, name in enumerate("abc")))
    assert len(engine.adapters) == 2
    gone = set("abc") - set(engine.adapters)
    assert [name for name in "abcd" if held[name].release.called] == sorted(gone)
    run(engine, named(3, [2], "d"))
    assert engine.adapters[-1] == "d"
    engine.close()
    assert all(held[name].release.called for name in "abc" if name in gone)


def test_only_so_many_adapters_are_at_hand(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MAX_AT_HAND", 2)
    engine, _ = make()
    for number in range(2):
        engine.add_request(named(number, [2], f"{number}"))
    with pytest.raises(QueueFull, match="name 2 adapters, 2 are allowed"):
        engine.add_request(named(2, [2], "2"))
    engine.add_request(named(3, [2], "1"))
    assert list(run(engine)) == ["0", "1", "3"]
    assert list(run(engine, named(4, [2], "2"))) == ["4"]


def test_without_adapters_a_request_of_one_is_refused(make: MakeEngine) -> None:
    engine, _ = make(enable_lora=False)
    with pytest.raises(InvalidRequest, match="adapters are not enabled here"):
        engine.add_request(named(0, [2], "red"))
