import logging
import os
import signal
from collections.abc import Iterator

import pytest
import ray

from quire.cluster.local import ended_by_signal, ray_session

NICENESS = "RAY_worker_niceness"


@pytest.mark.parametrize(("theirs", "holds"), [(None, "0"), ("5", "5")])
def test_workers_have_the_niceness_of_ours_unless_the_user_says_another(
    theirs: str | None, holds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(logging.Logger, "setLevel", lambda *_: None)  # Would outlive the test.
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {NICENESS: theirs} if theirs else {})
        with ray_session(address="somewhere"):
            assert os.environ[NICENESS] == holds


@pytest.fixture
def hung_up_as_by_default() -> Iterator[None]:
    """Whoever runs these tests may ignore it."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("hung_up_as_by_default")
def test_a_closing_terminal_ends_us_as_a_supervisor_does(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ended_by_signal():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("hung_up_as_by_default")
def test_what_runs_under_nohup_survives_the_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_by_signal():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
