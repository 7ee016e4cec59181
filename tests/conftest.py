"""Shared by all tests: Hypothesis profiles, tiny random Llama checkpoints, and a dump of waiting
asyncio tasks for tests that hang.

transformers makes the checkpoints once per run, and is also their oracle.
"""

import asyncio
import atexit
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from quire.worker.text.grammar.compiler import Grammars
    from quire.worker.text.tokenizer import Tokenizer

# Ray forks to start processes. In a process where gRPC has threads, such as this one, gRPC's fork
# handlers may end or hang the child. gRPC reads this variable when it starts.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # For `tools` and `bench`.

# No deadline, since an example's duration depends on the machine; the same examples in each run.
# `--hypothesis-profile=default` draws new ones; `quick`, which `make test` uses, tries fewer.
settings.register_profile(
    "quire", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("quick", settings.get_profile("quire"), max_examples=20)
settings.load_profile("quire")

# Keeps logs of test clusters apart from the user's.
os.environ.setdefault("QUIRE_STATE_DIR", str(Path(tempfile.gettempdir(), "quire-tests-state")))
# The same for adapters.
if "QUIRE_ADAPTER_DIR" not in os.environ:
    os.environ["QUIRE_ADAPTER_DIR"] = tempfile.mkdtemp(prefix="quire-adapters-")
    atexit.register(shutil.rmtree, os.environ["QUIRE_ADAPTER_DIR"], ignore_errors=True)

MakeLlama = Callable[..., Path]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow the parametrised cases that a test's mark ``quick_cells`` leaves out.

    ``quick_cells(number, *names)`` keeps ``number`` cases of each test, chosen by a hash of their
    names, and all whose name contains one of ``names``; either may be absent. A case that a
    parameter already marks as slow is never chosen.
    """
    drawn: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("quick_cells")
        cell = item.name.partition("[")[2]
        if mark is None or any(isinstance(each, str) and each in cell for each in mark.args):
            continue
        if item.get_closest_marker("slow") is not None:
            continue
        drawn.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in drawn.values():
        mark = cells[0].get_closest_marker("quick_cells")
        assert mark is not None
        number = next((each for each in mark.args if isinstance(each, int)), 0)
        for item in sorted(cells, key=lambda item: crc32(item.name.encode()))[number:]:
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skip-proven",
        action="store_true",
        help="skip slow tests that passed and on whose sources nothing has changed since",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a slow test that needs no second run (`tests.proofs`). All are under sanitizers."""
    from tests import proofs

    if not item.config.getoption("--skip-proven") or item.get_closest_marker("proof") is None:
        return
    sanitizers = os.environ.get("QUIRE_NATIVE_SANITIZE", "")
    if not sanitizers and item.get_closest_marker("slow") is None:
        return
    flag = f"-fsanitize={sanitizers}" if sanitizers else ""
    if proofs.holds(item.path, flag) and not proofs.is_drawn(item.nodeid):
        pytest.skip("passed before, and nothing on which it depends has changed")


@pytest.fixture(scope="session", autouse=True)
def _late_grpc_events() -> Generator[None]:
    """Drops gRPC's late events of a call whose event loop was closed with its test.

    One gRPC thread polls the events of all loops, and the running loop passes each on to its own.
    A closed loop raises there, which would fail an unrelated test.
    """
    hand_on = asyncio.BaseEventLoop.call_soon_threadsafe

    def hand_on_unless_closed(
        loop: asyncio.BaseEventLoop, callback: Callable[..., object], *args: Any, **options: Any
    ) -> object:
        if loop.is_closed() and callback.__module__ == "grpc._cython.cygrpc":
            return None
        return hand_on(loop, callback, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", hand_on_unless_closed)
        yield


@pytest.fixture(scope="module")
def marked() -> "Tokenizer":
    """A tokenizer whose special tokens are the markers of known models."""
    from tests.marked import marked_tokenizer

    return marked_tokenizer()


@pytest.fixture(scope="module")
def grammars(marked: "Tokenizer") -> "Grammars":
    from tests.marked import grammars_of

    return grammars_of(marked)


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory: pytest.TempPathFactory) -> MakeLlama:
    """``make_llama(name, max_shard_size=..., **LlamaConfig fields)`` → a checkpoint directory."""

    def make(name: str, *, max_shard_size: str = "5GB", seed: int = 0, **fields: Any) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        shape = {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            # Ten times the usual spread: greedy choices far enough apart to compare exactly.
            "initializer_range": 0.2,
        }
        model = LlamaForCausalLM(LlamaConfig(dtype=torch.float32, **(shape | fields)))
        with torch.no_grad():  # biases start as zeros, which would test nothing
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(".bias"):
                    parameter.normal_(std=0.2)
        path = tmp_path_factory.mktemp("llama") / name
        model.save_pretrained(path, max_shard_size=max_shard_size)
        return path

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_llama: MakeLlama) -> Path:
    """Two layers of 4:2 heads of 16, vocabulary 320, 512 positions, float32, one file."""
    return make_llama("tiny-llama")


@pytest.fixture(scope="session")
def tiny_llama_9_3(make_llama: MakeLlama) -> Path:
    """9:3 heads, tied embeddings, an odd vocabulary, stretched positions, in several files."""
    return make_llama(
        "tiny-llama-9-3",
        max_shard_size="60KB",
        seed=1,
        vocab_size=331,
        hidden_size=72,
        intermediate_size=100,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        eos_token_id=[2, 5],
    )


@pytest.fixture(scope="session")
def tiny_llama_with_biases(make_llama: MakeLlama) -> Path:
    return make_llama("tiny-llama-biases", seed=2, attention_bias=True, mlp_bias=True)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer() -> Generator[None, bool | None, bool | None]:
    """Prints where asyncio tasks wait when a test times out; pytest-timeout shows only threads."""
    result = yield
    fail = signal.getsignal(signal.SIGALRM)

    def show_tasks_and_fail(number: int, frame: Any) -> None:
        with contextlib.suppress(RuntimeError):  # No event loop runs.
            for task in asyncio.all_tasks():
                print(f"{task.get_name()} waits at", *_awaits(task.get_coro()), sep="\n  ")
        if callable(fail):
            fail(number, frame)

    signal.signal(signal.SIGALRM, show_tasks_and_fail)
    return result


def _awaits(awaitable: Any) -> list[str]:
    """The lines at which a coroutine is suspended, the outermost first."""
    lines = []
    while awaitable is not None:
        kind = next((k for k in ("cr", "gi", "ag") if hasattr(awaitable, f"{k}_frame")), None)
        frame = getattr(awaitable, f"{kind}_frame", None)
        if frame is None:
            break
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        awaitable = getattr(awaitable, f"{kind}_yieldfrom" if kind == "gi" else f"{kind}_await")
    return lines


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports ``bench.<name>`` from the repository's root, since benchmarks are not installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    return lambda name: importlib.import_module(f"bench.{name}")
