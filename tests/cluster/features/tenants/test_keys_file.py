"""The file of API keys with tenants and hashes, its reload, and the command that changes it."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cluster.cli.main import main
from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.features.tenants.limits import TenantPolicy
from quire.worker.request.errors import ConfigError

SECRET = "qk-the-secret-of-acme"
BOSS = "qk-the-secret-of-the-boss"


def hash_of(key: str) -> str:
    """A key's SHA-256 as printed by `sha256sum`."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


FILE = f"""\
# Who may call.
tenants:
  acme: {{weight: 2, requests_per_minute: 60, max_priority: 5}}
  boss:
    operator: true
  plain:
keys:
  # The build machines.
  - {{name: ci, tenant: acme, hash: "{hash_of(SECRET)}"}}
  - name: root
    tenant: boss
    hash: {hash_of(BOSS)}
    expires: 2100-01-01
  - {{name: old, tenant: plain, hash: "{hash_of("gone")}", expires: 2020-01-01T12:00:00Z}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(FILE)
    return path


def caller(keys: ApiKeys, key: str) -> Caller | None:
    return keys.caller(f"Bearer {key}")


def test_a_key_is_known_by_its_hash_and_has_its_tenants_policy(path: Path) -> None:
    keys = ApiKeys.load(path)
    found = caller(keys, SECRET)
    assert found is not None
    assert (found.tenant, found.key_name, found.is_operator) == ("acme", "ci", False)
    assert keys.policies["acme"] == TenantPolicy(weight=2, requests_per_minute=60, max_priority=5)
    assert keys.policies["plain"] == TenantPolicy()
    boss = caller(keys, BOSS)
    assert boss is not None
    assert boss.is_operator
    for stranger in ("gone", hash_of(SECRET), hash_of(SECRET)[7:], "", "acme", "tenants:"):
        assert caller(keys, stranger) is None
    assert keys.caller(None, SECRET) == found, "x-api-key"
    assert keys.caller("Basic Zm9v", SECRET) == found
    assert keys.caller("Bearer nothing", SECRET) == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("weight: 2", "weight: 0"), "line 3: weight: Input should be greater than 0"),
        (("weight: 2", "weight: .nan"), "line 3: weight: Input should be"),
        (("weight: 2", "heft: 2"), "line 3: an unknown field; there are weight, "),
        (("requests_per_minute: 60", "requests_per_minute: -1"), "line 3: requests_per_minute: "),
        (("requests_per_minute: 60", "requests_per_minute: many"), "line 3: requests_per_minute: "),
        (("max_priority: 5", "min_priority: 6, max_priority: 5"), "line 3: .*6 is above .* 5"),
        (("operator: true", "operator: perhaps"), "line 5: operator: "),
        (("tenant: acme, hash", "tenant: b, tenant: acme, hash"), "line 9: .* twice, .*line 9"),
        (("  plain:\n", "  acme:\n"), "line 6: this name stands here twice, .*line 3"),
        (("tenant: acme, hash", "tenant: nobody, hash"), "key 'ci': its tenant 'nobody' is not"),
        (("name: root", "name: ci"), "key 'ci': an earlier key has this name"),
        ((hash_of(BOSS), hash_of(SECRET)), "key 'root': an earlier key has this hash"),
        ((hash_of(BOSS), BOSS), "line 12: hash: must be 'sha256:' and 64 hex digits"),
        (("name: ci", "key: qk-the-secret-of-acme"), "line 9: .*unknown field; there are name"),
        (("{name: ci", "{qk-the-secret-of-acme: 1, name: ci"), "line 9: an unknown field"),
        (("  plain:", "  qk-the-secret-of-acme/ :"), "line 6: a name must have up to 64"),
        (("  # The build machines.", "  - *qk-the-secret-of-acme"), "line 8: is not YAML"),
        (("expires: 2100-01-01", "expires: qk-the-secret-of-the-boss"), "line 13: expires: "),
        (("keys:\n", "keys: qk-the-secret-of-acme\nmore:\n"), "line "),
    ],
)
def test_what_is_wrong_is_named_by_line_and_field_and_no_key_is_shown(
    path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in FILE
    path.write_text(FILE.replace(*change, 1))
    with pytest.raises(ConfigError, match=message) as raised:
        ApiKeys.load(path)
    for secret in (SECRET, BOSS, hash_of(SECRET), hash_of(BOSS)):
        assert secret not in str(raised.value)


@pytest.mark.parametrize("text", ["tenants:\n", "keys: []\n", "tenants: {a: }\nkeys:\n"])
def test_a_file_without_keys_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError):
        ApiKeys.load(path)


@pytest.mark.anyio
async def test_a_changed_file_is_read_and_a_bad_one_leaves_the_former(path: Path) -> None:
    keys, changes = ApiKeys.load(path), list[TenantPolicy]()
    keys.watch(lambda: changes.append(keys.policies["acme"]))
    await keys.look()
    assert not changes
    path.write_text(FILE.replace("weight: 2", "weight: 0"))
    await keys.look()
    assert "weight" in keys.trouble
    assert caller(keys, SECRET) is not None
    assert not changes
    path.unlink()
    await keys.look()
    assert "cannot be read" in keys.trouble
    path.write_text(FILE.replace("weight: 2", "weight: 3").replace(hash_of(SECRET), hash_of("b")))
    await keys.look()
    assert keys.trouble == ""
    assert [each.weight for each in changes] == [3]
    assert caller(keys, SECRET) is None
    assert caller(keys, "b") is not None


@pytest.mark.anyio
async def test_a_secret_of_kubernetes_is_followed_through_its_links(tmp_path: Path) -> None:
    """The mounted file is a link to a link, and Kubernetes replaces the latter."""
    for name, key in (("first", "one"), ("second", "two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys").write_text(f"{key} acme\n")
        os.utime(tmp_path / name / "keys", (1, 1))
    (tmp_path / "..data").symlink_to("first")
    (tmp_path / "keys").symlink_to("..data/keys")
    keys = ApiKeys.load(tmp_path / "keys")
    (tmp_path / "..new").symlink_to("second")
    (tmp_path / "..new").rename(tmp_path / "..data")
    await keys.look()
    assert caller(keys, "one") is None
    assert caller(keys, "two") is not None


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(["keys", *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    said = capsys.readouterr()
    return status, said.out, said.err


def test_a_new_key_is_printed_once_and_its_hash_is_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "made.yaml"
    made = {}
    for tenant, name in (("acme", "ci"), ("acme", "laptop"), ("other", "web")):
        status, out, _ = run(capsys, "new", "--tenant", tenant, "--name", name, "--file", f"{path}")
        assert status == 0
        made[name] = out.strip()
        assert made[name] not in path.read_text()
        assert len(made[name]) >= 43, "256 bits"
    assert path.stat().st_mode & 0o077 == 0
    data = yaml.safe_load(path.read_text())
    assert {each["name"]: each["hash"] for each in data["keys"]} == {
        name: hash_of(key) for name, key in made.items()
    }
    for name, tenant in (("ci", "acme"), ("web", "other")):
        found = caller(ApiKeys.load(path), made[name])
        assert found is not None
        assert (found.key_name, found.tenant) == (name, tenant)
    _, out, _ = run(capsys, "list", "--file", f"{path}")
    assert all(name in out for name in made)
    assert not any(key in out for key in made.values())
    assert run(capsys, "revoke", "laptop", "--file", f"{path}")[0] == 0
    keys = ApiKeys.load(path)
    assert caller(keys, made["laptop"]) is None
    assert caller(keys, made["ci"]) is not None


def test_a_file_keeps_its_comments_and_layout(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "new", "--tenant", "acme", "--name", "new", "--file", f"{path}")
    run(capsys, "new", "--tenant", "fresh", "--name", "more", "--file", f"{path}")
    for name in ("root", "ci", "new"):
        assert run(capsys, "revoke", name, "--file", f"{path}")[0] == 0
        ApiKeys.load(path)
    text = path.read_text()
    assert "# Who may call." in text
    assert "# The build machines." in text
    data = yaml.safe_load(text)
    assert [each["name"] for each in data["keys"]] == ["more", "old"]
    assert list(data["tenants"]) == ["fresh", "acme", "boss", "plain"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "--tenant", "acme", "--name", "ci", "--file", "{}"), "has a key of this name"),
        (("new", "--tenant", "a/b", "--name", "x", "--file", "{}"), "--tenant 'a/b'"),
        (("new", "--tenant", "a", "--name", "x", "--expires", "soon", "--file", "{}"), "--expires"),
        (("new", "--tenant", "*", "--name", "x", "--file", "{}"), "--tenant '*': must be 1 to 64"),
        (("new", "--tenant", "a", "--name", "a: b", "--file", "{}"), "--name 'a: b': must be 1 to"),
        (("new", "--tenant", "a", "--name", "12", "--file", "{}"), "--name '12': must be 1 to 64"),
        (("revoke", "nobody", "--file", "{}"), "there are ci, root, old"),
        (("list", "--file", "{}.not"), "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_and_nothing_changes(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    status, _, said = run(capsys, *(each.format(path) for each in arguments))
    assert status == 2
    assert message in said
    assert path.read_text() == FILE


def test_the_only_key_and_a_file_of_lines_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    run(capsys, "new", "--tenant", "a", "--name", "only", "--file", f"{path}")
    text = path.read_text()
    status, _, said = run(capsys, "revoke", "only", "--file", f"{path}")
    assert (status, path.read_text()) == (2, text)
    assert "make another key first" in said
    path.write_text("se-cret acme\n")
    status, _, said = run(capsys, "revoke", "x", "--file", f"{path}")
    assert status == 2
    assert "one key a line" in said
    assert "se-cret" not in said


def test_a_key_from_elsewhere_is_hashed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("my key\n"))
    assert run(capsys, "hash")[0] == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{SECRET}\n"))
    assert run(capsys, "hash")[:2] == (0, f"{hash_of(SECRET)}\n")


def test_the_layout_that_is_not_understood_is_left_to_the_user(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries: Any = [{"name": "x", "tenant": "a", "hash": hash_of("x")}]
    entries.append({"name": "y", "tenant": "a", "hash": hash_of("y")})
    path.write_text(
        yaml.safe_dump({"keys": entries, "tenants": {"a": {}}}, default_flow_style=True)
    )
    before = path.read_text()
    if before.startswith("{"):  # The first line of the second format is a name.
        path.write_text(before := before.strip()[1:-1].replace("tenants:", "\ntenants:"))
    status, _, said = run(capsys, "revoke", "x", "--file", f"{path}")
    assert status == 2, said
    assert path.read_text() == before
