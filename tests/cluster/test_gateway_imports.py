import subprocess
import sys

import pytest


@pytest.mark.slow
def test_a_gateway_imports_neither_torch_nor_ray_nor_transformers() -> None:
    script = (
        "import sys\n"
        "import quire.cluster.edge.grpc_server, quire.cluster.edge.openai_http\n"
        "heavy = {'torch', 'triton', 'transformers', 'ray'} & sys.modules.keys()\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
