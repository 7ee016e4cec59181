import logging

import pytest

from quire.router.failure_log import FailureLog


def test_each_kind_is_logged_once_in_a_while_with_how_many_were_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = [0.0]
    failures = FailureLog(logging.getLogger("test"), every_s=10, clock=lambda: now_s[0])
    for _ in range(5):
        failures.report(ValueError("odd"), "reading")
    failures.report(ValueError("odd"), "writing")
    failures.report(KeyError("odd"), "reading")
    now_s[0] = 10.0
    failures.report(ValueError("even"), "reading")
    assert [record.message for record in caplog.records] == [
        "reading failed: ValueError('odd')",
        "writing failed: ValueError('odd')",
        "reading failed: KeyError('odd')",
        "reading failed (4 more like the last one since): ValueError('even')",
    ]


def test_no_more_than_some_kinds_are_remembered() -> None:
    failures = FailureLog(logging.getLogger("test"))
    for number in range(200):
        failures.report(ValueError("odd"), f"reading {number}")
    assert len(failures._seen) == 64
