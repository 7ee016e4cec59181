"""A real cluster is upgraded under its clients' streams."""

from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_an_upgrade_breaks_no_stream(bench_module: Callable[[str], ModuleType]) -> None:
    figures = bench_module("rolling").upgrade(6, start_first=False, drain_s=20)
    assert figures["complete"] > 6
    assert (figures["broken"], figures["refused"], figures["inexact"]) == (0, 0, 0), figures
