"""Small random models, and transformers' greedy tokens and log probabilities for them."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers

LENGTHS = (1, 16, 33, 70, 71, 130, 131)
MAX_TOKENS = 10


def prompts(*, shortest: int = 1) -> list[list[int]]:
    """Prompts, some of which share a prefix."""
    rng = random.Random(3)
    stems = [[rng.randrange(3, 300) for _ in range(max(LENGTHS))] for _ in range(2)]
    lengths = [length for length in LENGTHS if length >= shortest]
    return [stems[number % 2][:length] for number, length in enumerate(lengths)]


def save(path: Path, name: str, fields: dict[str, Any]) -> None:
    """Saves a small random model; ``name`` is the prefix of transformers' class names."""
    torch.manual_seed(0)
    model = model_class(name)(config(name, fields))
    with torch.no_grad():  # Otherwise biases are 0, norms 1.
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith((".bias", "proj_bias", "norm.weight", ".sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)


def config(name: str, fields: dict[str, Any]) -> Any:
    """The configuration of a small model; ``name`` as in `save`."""
    common: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": torch.float32,
    }
    kind = "Gemma3Text" if name == "Gemma3" else name
    return getattr(transformers, f"{kind}Config")(**(common | fields))


def model_class(name: str) -> Any:
    return getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and log probabilities, each by a whole forward pass, without a cache."""
    token_ids, logprobs = list(prompt), []
    for _ in range(MAX_TOKENS):
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        token_ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[token_ids[-1]]))
    return token_ids[len(prompt) :], logprobs


Checkpoint = tuple[Path, list[list[int]], list[list[float]]]
"""A checkpoint directory, and transformers' output tokens and log probabilities by prompt."""


def with_answers(path: Path, prompts: list[list[int]]) -> Checkpoint:
    """The checkpoint in ``path`` with transformers' answers, computed in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    pairs = [greedy(model, prompt) for prompt in prompts]
    return path, [pair[0] for pair in pairs], [pair[1] for pair in pairs]
