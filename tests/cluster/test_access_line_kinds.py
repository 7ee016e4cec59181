"""Calls that no group serves also have an access line, whatever their fields."""

from typing import Any

import httpx
import pytest
from tests.cluster.test_access_log import SECRET, Lines, lines

from quire.cluster.telemetry.access_log import log_access

pytestmark = pytest.mark.anyio

__all__ = ["lines"]

TOO_LONG = {"prompt": SECRET * 3000, "max_tokens": 1}


async def asked_of(cluster: Any, method: str, path: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
        return await client.request(method, path, **more)


@pytest.mark.parametrize(
    ("method", "path", "more", "status", "error"),
    [
        ("POST", "/v1/completions", {"content": b"{not json"}, "400", "INVALID_REQUEST"),
        ("POST", "/v1/completions", {"json": TOO_LONG}, "400", "CONTEXT_EXCEEDED"),
        ("POST", "/v1/embeddings", {"json": {"input": SECRET}}, "400", "INVALID_REQUEST"),
        ("GET", "/v1/completions", {}, "405", None),
        ("GET", "/v1/models", {}, "200", None),
    ],
)
async def test_a_call_without_tokens_has_a_line(
    start_cluster: Any,
    lines: Lines,
    method: str,
    path: str,
    more: dict[str, Any],
    status: str,
    error: str | None,
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        answer = await asked_of(cluster, method, path, **more)
        await lines.wait(1)
    (line,) = lines.of(path)
    assert (line["method"], line["status"], line.get("error")) == (method, status, error)
    assert line["status"] == str(answer.status_code)
    assert SECRET not in str(line)


async def test_a_hostile_path_stays_one_short_line(start_cluster: Any, lines: Lines) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        await asked_of(cluster, "GET", f"/v1/%0aINFO%20forged%1b[2J{'a' * 3000}")
        await lines.wait(1)
    (record,) = lines.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 500


@pytest.mark.parametrize("name", ["a\tb", "b" * 500])
async def test_a_name_that_is_not_sane_is_not_logged(
    start_cluster: Any, lines: Lines, name: str
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        cluster.models.on_finished.append(log_access)
        await asked_of(cluster, "GET", "/v1/models", headers={"X-Request-Id": name})
        await lines.wait(1)
    assert "client_request_id" not in vars(lines.records[0])
    assert name not in lines.records[0].getMessage()
