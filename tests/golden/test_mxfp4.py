"""gpt-oss with experts in MXFP4: tokens are those of transformers with the weights it decodes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.golden.oracle import greedy, prompts, save
from tests.golden.test_families import GPT_OSS, GREEDY
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.llm import LLM
from quire.worker.request.errors import CheckpointError, ConfigError

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in prompts()]


def encode(values_EIO: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises to blocks ``[E, O, I / 32, 16]`` and scales, powers of two: the greatest of each 32
    inputs is below 8 times its scale."""
    values = values_EIO.transpose(1, 2)
    values = values.reshape(*values.shape[:2], -1, 32)
    exponent = torch.frexp(values.abs().amax(-1)).exponent - 3
    magnitude = (torch.ldexp(values, -exponent[..., None]).abs()[..., None] - LEVELS).abs()
    codes = (magnitude.argmin(-1) + 8 * (values < 0)).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4") / "model"
    save(path, "GptOss", GPT_OSS)
    file, stored = path / "model.safetensors", {}
    for name, values in load_file(file).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = encode(values)
        else:
            stored[name] = values
    save_file(stored, file)
    edit(path, quantization_config=CONFIG)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Tokens and log probabilities of transformers' model with the experts that it decodes."""
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_blocks")]:
        module = name.removesuffix("_blocks")
        parts = stored.pop(name), stored.pop(f"{module}_scales")
        stored[module] = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    path = tmp_path_factory.mktemp("mxfp4") / "decoded"
    shutil.copytree(folder, path)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    edit(path, quantization_config=None)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    return [greedy(model, prompt) for prompt in prompts()]


@pytest.mark.quick_cells("native-1")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tokens_are_those_of_transformers(
    num_ranks: int, folder: Path, expected: list[Any]
) -> None:
    # A rank's 48 inner channels are one and a half groups of a scale.
    with LLM(
        folder, device="cpu", num_blocks=128, num_threads=1, tensor_parallel_size=num_ranks
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output, (token_ids, logprobs) in zip(outputs, expected, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == token_ids
        pairs = zip(completion.logprobs or [], completion.token_ids, strict=True)
        chosen = [each[token].logprob for each, token in pairs]
        assert chosen == pytest.approx(logprobs, abs=2e-4)


@pytest.mark.parametrize(
    ("suffix", "values", "message"),
    [
        ("down_proj_scales", None, "down_proj_scales' .* is in none of"),
        ("down_proj_scales", torch.full((5, 64, 3), 255), "values that are NaN"),
        ("down_proj_blocks", torch.zeros(5, 64, 3, 8), "down_proj_blocks' has shape"),
    ],
)
def test_what_a_checkpoint_lacks_is_named(
    suffix: str, values: Tensor | None, message: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file, name = tmp_path / "model.safetensors", f"model.layers.0.mlp.experts.{suffix}"
    stored = load_file(file)
    del stored[name]
    save_file(stored | ({} if values is None else {name: values.to(torch.uint8)}), file)
    with pytest.raises(CheckpointError, match=message):
        LLM(tmp_path, device="cpu", num_blocks=128)


def test_other_families_and_a_second_rounding_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="have 4 bits already"):
        LLM(folder, device="cpu", quantization="int8")
    save(tmp_path, "Mixtral", {"num_local_experts": 2})
    edit(tmp_path, quantization_config=CONFIG)
    with pytest.raises(CheckpointError, match="'mxfp4' is supported of gpt-oss' experts only"):
        LLM(tmp_path, device="cpu")


def edit(path: Path, **fields: Any) -> None:
    """Sets fields of a model's ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
