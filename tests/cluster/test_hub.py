"""Models of the hub where a cluster is started. For groups see
tests/served/test_serve_command.py."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.hub_server import Repository, files_of, hub_server

from quire import demo_model

_BUILD = """
from quire.cluster.deploy import app

app.build_groups = lambda config, part: config
config = app.groups({"engine": {"model": "org/demo@v1"}})
print(config.engine.model, config.model_name)
"""


@pytest.mark.slow
def test_an_application_names_a_commit_and_leaves_the_weights_to_its_nodes(tmp_path: Path) -> None:
    with hub_server() as hub:
        repository = hub.repositories["org/demo"] = Repository()
        commit = repository.commit(files_of(demo_model.PATH), branch="v1")
        done = subprocess.run(
            [sys.executable, "-c", _BUILD],
            env=hub.environment(tmp_path / "home"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"org/demo@{commit}", "org/demo"]
    assert "tokenizer.json" in hub.sent()
    assert not hub.sent(".safetensors")
