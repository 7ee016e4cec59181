"""Upgrades a real cluster under gRPC and HTTP clients, on old and new connections."""

from argparse import Namespace
from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_an_upgrade_breaks_no_stream(
    bench_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    rolling = bench_module("rolling")
    monkeypatch.setattr(rolling, "SETTLE_S", 1)
    asked = Namespace(streams=12, tokens=80, requests=1, start_first=False, drain_s=20)
    figures = rolling.upgrade(asked, changes=[{"max_num_seqs": 24}])
    assert len(figures["complete_by_client"]) == 4, figures
    assert min(figures["complete_by_client"].values()) > 6, figures
    assert (figures["broken"], figures["refused"], figures["inexact"]) == (0, 0, 0), figures
