import logging

import pytest

from quire.cluster.seldom import EVERY_S, SeldomWarning


def test_a_flood_of_warnings_is_one_line_in_a_while_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 5.0
    warn = SeldomWarning(logging.getLogger("quire.test"), clock=lambda: now_s)
    for number in range(500):
        warn("%s showed no ticket", f"host {number}")
    assert caplog.messages == ["host 0 showed no ticket"]
    now_s += EVERY_S
    warn("%s showed no ticket", "another")
    assert caplog.messages[1:] == [
        "another showed no ticket; since the last such line, 499 more times"
    ]
    now_s += EVERY_S
    warn("%s showed no ticket", "the last")
    assert caplog.messages[2:] == ["the last showed no ticket"]
