"""Only changed settings that groups read make Serve replace groups."""

import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

import quire.cluster
from quire import demo_model
from quire.cluster.config import ClusterConfig, GroupConfig
from quire.cluster.deploy.serve_options import (
    check_of_groups,
    gateway_version,
    group_config,
    group_version,
)
from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

CONFIG = ClusterConfig(engine=EngineConfig(model=demo_model.PATH))
SOURCE = Path(quire.cluster.__path__[0])


def test_a_group_reads_no_setting_that_does_not_replace_it() -> None:
    deployments = (SOURCE / "deploy/deployments.py").read_text()
    replica = deployments.partition("class ReplicaGroup")[2].partition("\nclass ")[0]
    code = replica + "".join(path.read_text() for path in (SOURCE / "group").rglob("*.py"))
    read = set(re.findall(r"\bconfig\.(\w+)", code))
    assert {"engine", "group_host", "silence_timeout_s"} <= read
    given = {field.name for field in fields(GroupConfig)}
    assert read & {field.name for field in fields(ClusterConfig)} <= given


def test_a_group_is_given_nothing_that_gateways_alone_use() -> None:
    changed = replace(
        CONFIG,
        routing=RoutingConfig(policy="round_robin"),
        aliases=("a",),
        max_inflight=9,
        chat_template="A",
        api_keys_file=Path("keys"),
        start_first=True,
    )
    given, plain = asdict(group_config(changed)), asdict(group_config(CONFIG))
    assert given == plain
    assert group_version(changed) == group_version(CONFIG)


@pytest.mark.parametrize(("num_groups", "expected"), [(1, False), (2, True)])
def test_more_groups_replace_none_but_new_ones_take_blocks(num_groups: int, expected: bool) -> None:
    config = replace(CONFIG, num_groups=num_groups)
    assert group_config(config).transfers_kv == expected
    assert group_version(config) == group_version(CONFIG)


def test_a_file_cannot_give_groups_what_gateways_alone_use() -> None:
    check_of_groups(["engine", "autoscaling", "num_groups", "silence_timeout_s"])
    with pytest.raises(ConfigError, match=r"^max_inflight, routing: only gateways use these"):
        check_of_groups(["engine", "max_inflight", "routing"])


def test_who_may_connect_is_no_reason_to_load_a_model_again() -> None:
    changed = replace(CONFIG, allow_origins=("*",), max_connections=9, http_port=9, host="0.0.0.0")
    assert group_version(changed) == group_version(CONFIG)
    assert gateway_version(changed) != gateway_version(CONFIG)
    louder = replace(CONFIG, silence_timeout_s=9)
    assert group_version(louder) != group_version(CONFIG)
    assert gateway_version(louder) != gateway_version(CONFIG)
