"""Names of applications."""

from types import SimpleNamespace

import pytest
from ray import serve

from quire.cluster.deploy.names import check_free, check_known, name_of_application
from quire.worker.api.errors import ConfigError


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
