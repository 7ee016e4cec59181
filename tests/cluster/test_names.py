"""Names of applications."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from quire.cluster.deploy.names import (
    check_free,
    check_known,
    deployments_of,
    known_parts,
    name_of_application,
    next_part,
    part_of,
    parts_among,
)
from quire.worker.request.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("quire-demo", "quire-demo"),
        ("org/Model-1.5", "org-Model-1.5"),
        ("a b#c", "a-b-c"),
        ("...", "quire"),
        ("m" * 80, "m" * 63),
    ],
)
def test_a_name_is_made_from_the_models(model: str, name: str) -> None:
    assert name_of_application(model) == name
    assert name_of_application(model, name) == name


@pytest.mark.parametrize("name", ["", "a/b", "a#b", "-a", "a b", "a" * 64, "a\n"])
def test_a_name_that_serve_could_not_use_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must begin with a letter or digit"):
        name_of_application("model", name)


def test_a_name_in_use_is_told_from_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(applications={"mine": SimpleNamespace(status="DEPLOY_FAILED")})
    monkeypatch.setattr(serve, "status", lambda: status)
    check_free("another")
    check_known("mine")
    with pytest.raises(
        ConfigError, match=r"'mine': .*\(deploy failed\); .*--name.*`quire stop mine`"
    ):
        check_free("mine")
    with pytest.raises(ConfigError, match=r"'another': .* no such application; there are: mine"):
        check_known("another")


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("demo", "demo"),
        ("org/name", "org--name"),
        ("Qwen3-0.6B", "Qwen3-0.6B"),
    ],
)
def test_a_part_is_called_after_its_model(model: str, part: str) -> None:
    assert part_of(model) == part
    assert next_part(part_of(model)) == part_of(model, 2) == f"{part}:2"
    assert next_part(part_of(model, 2)) == part_of(model, 3)


def test_parts_of_two_models_differ_and_are_bounded() -> None:
    models = ["org/name", "org--name", "a b", "a:b", "a-b", "x" * 63, "x" * 64, "x" * 65, "é"]
    parts = {part_of(each) for each in models}
    assert len(parts) == len(models)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,63}", each) for each in parts)


def test_a_cluster_knows_its_parts_from_those_of_one_with_a_longer_name() -> None:
    names = ["chat", "chat:demo", "chat:demo:2", "chats", "chats:x", "chat.x", "chat.x:y"]
    assert parts_among("chat", names) == ["demo", "demo:2"]


def test_a_model_keeps_the_part_that_serve_has_of_it() -> None:
    names = ["c", "c:a", "c:b:9", "c:b:10", "other:d", "c:org--e:2"]
    assert known_parts("c", ["a", "b", "d", "org/e"], names) == {
        "a": "a",
        "b": "b:10",
        "org/e": "org--e:2",
    }


def test_deployments_bear_their_models_name_where_there_are_several() -> None:
    gateways, demo, other = object(), object(), object()

    def applications(**each: object) -> Any:
        return {
            name.replace("__", ":"): SimpleNamespace(
                deployments={"ReplicaGroup" if "__" in name else "Gateway": deployment}
            )
            for name, deployment in each.items()
        }

    one = deployments_of("chat", applications(chat=gateways, chat__demo=demo, x__demo=other))
    assert one == {"Gateway": gateways, "ReplicaGroup": demo}
    two = deployments_of("chat", applications(chat=gateways, chat__demo=demo, chat__other=other))
    assert two == {
        "Gateway": gateways,
        "ReplicaGroup-demo": demo,
        "ReplicaGroup-other": other,
    }
    assert deployments_of("chat", {}) == {}
