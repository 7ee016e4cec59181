"""A new setting is one edit: a field with its docstring. All else follows from it."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cluster.serving import admission_config

FIELD = '''
    max_tea_s: float = 4.5
    """How long a request may wait for ``max_inflight`` cups of tea."""
'''
MODULE = admission_config.__name__
SCRIPT = f"""
import importlib.util, json, sys
from contextlib import redirect_stdout, suppress
from io import StringIO

class Edited:
    def find_spec(name, path=None, target=None):
        if name == {MODULE!r}:
            return importlib.util.spec_from_file_location(name, sys.argv[1])

sys.meta_path.insert(0, Edited)
from quire.cluster.cli.commands import command_line
from quire.cluster.cli.main import main
from quire.cluster.cli.cluster import cluster_config
from quire.cluster.config import ModelConfig
from quire.cluster.settings import settings_of

def shown(*arguments):
    with redirect_stdout(StringIO()) as text, suppress(SystemExit):
        main(arguments)
    return text.getvalue()

def value(*flags):
    return cluster_config(command_line().parse_args(["serve", *flags])).max_tea_s

found = dict(help=shown("serve", "--help"), default=value(), flag=value("--max-tea-s", "5"))
found["file"] = value("--config", sys.argv[2])
import os
os.environ["QUIRE_MAX_TEA_S"] = "6"
found["variable"] = value("--config", sys.argv[2])
found["printed"] = shown("serve", "--print-config")
from tools import chart_values
from tools.reference.configuration import page
found["page"] = page()
found["schema"] = json.loads(chart_values.schema())["properties"]["settings"]["properties"]
found["template"] = chart_values.template()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_field_is_a_flag_a_variable_a_key_a_row_and_a_value_of_the_chart(tmp_path: Path) -> None:
    edited, file = tmp_path / "admission_config.py", tmp_path / "quire.yaml"
    source = inspect.getsource(admission_config)
    place = "    max_inflight: int = 4096\n"
    assert place in source
    edited.write_text(source.replace(place, FIELD + place, 1))
    file.write_text("max_tea_s: 7\n")
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, edited, file], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert (found["default"], found["flag"], found["file"], found["variable"]) == (4.5, 5, 7, 6)
    help_text = " ".join(found["help"].split())
    assert (
        "--max-tea-s MAX_TEA_S How long a request may wait for --max-inflight cups of tea. "
        "(default: 4.5)"
    ) in help_text
    assert found["printed"] == "max_tea_s: 6.0  # QUIRE_MAX_TEA_S\n"
    assert "| `max_tea_s` float | `4.5` | How long a request may wait for" in found["page"]
    assert found["schema"]["max_tea_s"] == {
        "description": "How long a request may wait for ``max_inflight`` cups of tea.",
        "type": "number",
    }
    (models,) = [each for each in found["template"].splitlines() if "max_inflight" in each]
    assert "max_tea_s" in models.split()


def test_the_chart_passes_settings_on_and_its_older_values_still_work() -> None:
    pytest.importorskip("helm_python")
    from tests.helm.charts import applications, render, settings

    manifests = render(
        {
            "settings": {"max_inflight": 7, "handover_s": 2},
            "admission": {"maxInflight": 9, "maxQueuedRequests": 3},
            "moreModels": [{"served_model_name": "b", "engine": {"model": "/models/b"}}],
        }
    )
    given = settings(manifests)
    assert (given["max_inflight"], given["max_queued_requests"], given["handover_s"]) == (7, 3, 2)
    assert given["more_models"][0]["max_inflight"] == 7
    _, *groups = [each["args"] for each in applications(manifests)]
    assert [each["handover_s"] for each in groups] == [2, 2]
    assert not [each for each in groups if "max_inflight" in each]
