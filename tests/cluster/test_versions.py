"""Which settings have Serve replace groups: those that they read, and no gateway's alone."""

import re
from dataclasses import fields, replace
from pathlib import Path

import quire.cluster
from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.serve_options import _NOT_A_GROUPS, gateway_version, group_version
from quire.worker.api.config import EngineConfig

CONFIG = ClusterConfig(engine=EngineConfig(model=demo_model.PATH))
SOURCE = Path(quire.cluster.__path__[0])


def test_a_group_reads_no_setting_that_does_not_replace_it() -> None:
    deployments = (SOURCE / "deploy/deployments.py").read_text()
    replica = deployments.partition("class ReplicaGroup")[2].partition("\nclass ")[0]
    code = replica + "".join(path.read_text() for path in (SOURCE / "group").rglob("*.py"))
    read = set(re.findall(r"\bconfig\.(\w+)", code))
    assert {"engine", "group_host", "silence_timeout_s"} <= read
    assert read & set(_NOT_A_GROUPS) == set()
    assert set(_NOT_A_GROUPS) <= {field.name for field in fields(ClusterConfig)}


def test_who_may_connect_is_no_reason_to_load_a_model_again() -> None:
    changed = replace(CONFIG, allow_origins=("*",), max_connections=9, http_port=9, host="0.0.0.0")
    assert group_version(changed) == group_version(CONFIG)
    assert gateway_version(changed) != gateway_version(CONFIG)
    louder = replace(CONFIG, silence_timeout_s=9)
    assert group_version(louder) != group_version(CONFIG)
    assert gateway_version(louder) != gateway_version(CONFIG)
