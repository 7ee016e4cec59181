"""The list of policy names, which imports no policy, is complete."""

import subprocess
import sys

from quire.router.config import POLICY_NAMES
from quire.router.policies.catalog import POLICIES


def test_every_policy_has_its_line() -> None:
    assert list(POLICY_NAMES) == list(POLICIES)
    assert all(POLICY_NAMES.values())


def test_reading_flags_and_settings_loads_no_policy() -> None:
    code = "import sys, quire.cluster.cli.main; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
