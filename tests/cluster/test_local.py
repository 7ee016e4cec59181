import logging
import os

import pytest
import ray

from quire.cluster.deploy.local import ray_session

NICENESS = "RAY_worker_niceness"


@pytest.mark.parametrize(("theirs", "holds"), [(None, "0"), ("5", "5")])
def test_workers_have_the_niceness_of_ours_unless_the_user_says_another(
    theirs: str | None, holds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(logging.Logger, "setLevel", lambda *_: None)  # It would last.
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {NICENESS: theirs} if theirs else {})
        with ray_session(address="somewhere"):
            assert os.environ[NICENESS] == holds
