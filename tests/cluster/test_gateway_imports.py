import pickle
import subprocess
import sys

import pytest

from quire.cluster.deploy.gateway_calls import ModelState


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


def test_a_command_that_reads_what_a_gateway_told_does_not_import_the_gateway() -> None:
    told = ModelState(
        name="m", aliases=(), path="/m", num_groups=1, state="ready", reason="", unsettled=""
    )
    script = (
        "import pickle, sys\n"
        "assert pickle.load(sys.stdin.buffer).name == 'm'\n"
        "import quire.cluster.deploy.overview\n"
        "heavy = {'grpc', 'starlette', 'uvicorn', 'pydantic', 'ray', 'tokenizers', 'torch'}\n"
        "print(heavy & sys.modules.keys() or 'none')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(told), capture_output=True, check=True
    )
    assert done.stdout.split() == [b"none"]
