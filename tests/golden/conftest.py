"""Runs every golden test twice: with the native CPU library, and with PyTorch alone."""

import pytest

from quire.kernels import native


@pytest.fixture(autouse=True, params=["native", "pytorch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "pytorch":
        monkeypatch.setenv("QUIRE_NATIVE", "0")  # for ranks in processes of their own
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no native library on this machine")
