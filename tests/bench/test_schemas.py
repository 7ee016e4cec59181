from collections.abc import Callable
from types import ModuleType

from quire import demo_model
from quire.worker.text.tokenizer import Tokenizer


def test_what_schemas_allow_is_valid(bench_module: Callable[[str], ModuleType]) -> None:
    tokenizer = Tokenizer.load(demo_model.PATH)
    found = bench_module("schemas").check(tokenizer, 60, seed=3, eos_token_id=1)
    assert found.counts["output valid"] > 40, found.examples
    assert not found.counts["output invalid"], found.examples
