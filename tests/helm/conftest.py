"""Fixtures for each values file in ``helm/quire/ci``: its values and the rendered manifests."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))
from tests.helm.charts import VALUES, Manifest, render  # noqa: E402


@pytest.fixture(scope="module", params=sorted(VALUES))
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    given: dict[str, Any] = yaml.safe_load(VALUES[request.param].read_text())
    return given


@pytest.fixture(scope="module")
def manifests(values: dict[str, Any]) -> list[Manifest]:
    return render(values)
