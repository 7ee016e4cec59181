import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_offline_api_imports_nothing_slow_before_it_is_needed() -> None:
    script = (
        "import sys\n"
        "import quire.llm\n"
        "slow = {'torch', 'transformers', 'jinja2', 'tqdm'} & sys.modules.keys()\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
