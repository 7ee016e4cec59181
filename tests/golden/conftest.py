"""Runs every golden test twice: with the native CPU library, and with PyTorch alone.

All tests of this folder are proofs (`tests.proofs`): they depend on worker and kernels alone.
"""

from pathlib import Path

import pytest

from quire.kernels.native import library as native


@pytest.fixture(autouse=True, params=["native", "pytorch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pytorch":
        monkeypatch.setenv("QUIRE_NATIVE", "0")  # for ranks in processes of their own
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no native library on this machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.proof)
