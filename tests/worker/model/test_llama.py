"""The Llama model against transformers, and its batch invariance."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

CHECKPOINTS = ("tiny_llama", "tiny_llama_9_3", "tiny_llama_with_biases")
AROUND_BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129)


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def random_tokens(num_tokens: int, *, seed: int = 0, vocab_size: int = 320) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab_size, num_tokens)]


def expected_logits(oracle: Callable[[Path], Any], path: Path, tokens: Sequence[int]) -> Any:
    with torch.no_grad():
        return oracle(path)(torch.tensor([list(tokens)])).logits[0]


@pytest.mark.parametrize("length", AROUND_BORDERS)
def test_logits_are_those_of_transformers(
    checkpoint: Path, length: int, runner_of: Any, oracle: Any, driver: Any, row: Any
) -> None:
    tokens = random_tokens(length, seed=length)
    logits = runner_of(checkpoint).forward(driver.step([row(tokens, range(7, 40))]))
    expected = expected_logits(oracle, checkpoint, tokens)[-1:]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 32, 40])
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(
    cut: int, tiny_llama_9_3: Path, runner_of: Any, oracle: Any, driver: Any, row: Any
) -> None:
    tokens, blocks = random_tokens(41, seed=cut), [9, 3, 5]
    runner = runner_of(tiny_llama_9_3)
    runner.forward(driver.step([row(tokens[:cut], blocks, samples=False)]))
    logits = runner.forward(driver.step([row(tokens, blocks, done=cut)]))
    whole = runner.forward(driver.step([row(tokens, [11, 2, 7])]))
    torch.testing.assert_close(
        logits, expected_logits(oracle, tiny_llama_9_3, tokens)[-1:], atol=1e-4, rtol=0
    )
    assert torch.equal(logits, whole)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("num_others", [1, 2, 3, 4, 12])
def test_a_rows_logits_have_the_same_bits_in_any_batch(
    num_others: int,
    threads: int,
    dtype: str,
    tiny_llama: Path,
    runner_of: Any,
    driver: Any,
    row: Any,
) -> None:
    runner = runner_of(tiny_llama, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens = random_tokens(20)
        decode = row(tokens, [0, 1], done=19)
        chunk = row(random_tokens(37, seed=1), [2, 3, 4])
        runner.forward(driver.step([row(tokens[:19], [0, 1])]))
        alone = [runner.forward(driver.step([each])) for each in (decode, chunk)]
        others = [
            row(random_tokens(1 + 5 * i, seed=9 + i), range(5 + 5 * i, 10 + 5 * i))
            for i in range(num_others)
        ]
        together = runner.forward(driver.step([decode, chunk, *others]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together[0], alone[0][0])
    assert torch.equal(together[1], alone[1][0])


def test_only_sampled_rows_have_logits(
    tiny_llama: Path, runner_of: Any, driver: Any, row: Any
) -> None:
    runner = runner_of(tiny_llama)
    rows = [
        row(random_tokens(9, seed=1), [0], samples=False),
        row(random_tokens(9, seed=2), [1]),
        row(random_tokens(9, seed=3), [2], samples=False),
    ]
    logits = runner.forward(driver.step(rows))
    assert torch.equal(logits, runner.forward(driver.step(rows[1:2])))
    none = runner.execute(driver.step(rows[:1]))
    assert none.token_ids_S.shape == (0,)


@pytest.mark.parametrize("block_size", [4, 128])
def test_the_block_size_changes_nothing(
    block_size: int, tiny_llama: Path, runner_of: Any, driver: Any, driver_of: Any, row: Any
) -> None:
    tokens = random_tokens(130)
    logits = runner_of(tiny_llama, block_size=block_size, num_blocks=128).forward(
        driver_of(block_size).step([row(tokens, range(60, 128))])
    )
    assert torch.equal(logits, runner_of(tiny_llama).forward(driver.step([row(tokens, range(9))])))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_to_float32_as_that_of_transformers(
    dtype: str, tiny_llama: Path, runner_of: Any, oracle: Any, driver: Any, row: Any
) -> None:
    from transformers import LlamaForCausalLM

    tokens = random_tokens(50)
    exact = expected_logits(oracle, tiny_llama, tokens)[-1]
    theirs = LlamaForCausalLM.from_pretrained(
        tiny_llama, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    with torch.no_grad():
        their_error = (theirs(torch.tensor([tokens])).logits[0, -1].float() - exact).norm()
    ours = runner_of(tiny_llama, dtype=dtype).forward(driver.step([row(tokens, range(4))]))[0]
    assert (ours - exact).norm() < 1.5 * their_error


@pytest.mark.parametrize("rope_type", ["linear", "llama3"])
def test_rotary_tables_are_those_of_transformers(rope_type: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from quire.worker.model.rope import rotary_table
    from quire.worker.model.spec import Rope

    stretch: dict[str, Any] = {"factor": 8.0}
    if rope_type == "llama3":
        stretch |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=1,
        max_position_embeddings=65_536,
        rope_parameters={"rope_type": rope_type, "rope_theta": 500_000.0, **stretch},
    )
    theirs = LlamaRotaryEmbedding(config)
    if rope_type == "llama3":
        stretch["original_max_positions"] = stretch.pop("original_max_position_embeddings")
    rope = Rope(size=128, theta=500_000.0, kind=rope_type, **stretch)  # type: ignore[arg-type]
    table = rotary_table(rope, 9000, head_size=128, device=torch.device("cpu"))
    their_cosines, their_sines = theirs(torch.zeros(1), torch.arange(9000)[None])
    # Angles reach 9000 rad, where one step of float32 is 1e-3 rad.
    torch.testing.assert_close(table.cos_PR, their_cosines[0, :, :64], atol=2e-3, rtol=0)
    torch.testing.assert_close(table.sin_PR, their_sines[0, :, :64], atol=2e-3, rtol=0)
