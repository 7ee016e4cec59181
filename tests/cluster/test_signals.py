import signal
import threading
from collections.abc import Iterator

import pytest

from quire.cluster.deploy.signals import ended_by_signal


@pytest.fixture
def hung_up_as_by_default() -> Iterator[None]:
    """Resets SIGHUP, which the caller of the tests may ignore."""
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


def test_what_a_script_started_in_the_background_is_ended_by_sigint() -> None:
    """Shells let background processes ignore SIGINT."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), ended_by_signal():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("hung_up_as_by_default")
def test_what_runs_under_nohup_survives_the_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_by_signal():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_in_another_thread_signals_stay_as_they_are() -> None:
    entered = []

    def run() -> None:
        with ended_by_signal():
            entered.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [before]
