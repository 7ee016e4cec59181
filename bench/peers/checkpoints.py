"""The checkpoints that all engines are measured on: Llama shapes with random weights.

A checkpoint is made once and found again by its name; its bits depend on its name alone. Weights
are bfloat16, so that every engine reads the same values whatever it computes in. The tokenizer is
a byte-level BPE of the same 32,000 entries for all: every byte, then pairs of bytes.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 32_000
MAX_POSITIONS = 2048


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model to measure, and how many requests it is given at once."""

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    tied: bool = False
    """The LM head is the embedding."""
    num_requests: int

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices."""
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = self.hidden_size * (2 * q + 2 * kv)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * VOCAB_SIZE

    @property
    def num_parameters(self) -> int:
        return self.layer_weights + self.head_weights * (1 if self.tied else 2)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="S",
            hidden_size=288,
            num_layers=6,
            num_heads=9,
            num_kv_heads=3,
            head_size=32,
            intermediate_size=768,
            tied=True,
            num_requests=128,
        ),
        Shape(
            name="M",
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            num_kv_heads=4,
            head_size=64,
            intermediate_size=2048,
            num_requests=64,
        ),
        Shape(
            name="L",
            hidden_size=1280,
            num_layers=24,
            num_heads=20,
            num_kv_heads=4,
            head_size=64,
            intermediate_size=3456,
            num_requests=32,
        ),
    )
}


def make_checkpoint(shape: Shape, folder: Path) -> Path:
    """The checkpoint's directory under ``folder``, written if it is not there yet."""
    path = folder / f"random-{shape.name}-{shape.num_parameters / 1e6:.0f}M"
    done = path / "config.json"  # Written last.
    if not done.is_file():
        path.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(path)
        _write_weights(shape, path)
        done.write_text(json.dumps(llama_config(shape), indent=1) + "\n")
    return path


def llama_config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _write_weights(shape: Shape, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(shape.num_parameters)

    def random(*size: int, scale: float = 0.02) -> torch.Tensor:
        return torch.randn(size, generator=generator).mul_(scale).bfloat16()

    hidden, mlp = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    tensors = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    if not shape.tied:
        tensors["lm_head.weight"] = random(VOCAB_SIZE, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, size in {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }.items():
            # So large beside the embedding that a tied head does not just repeat the last token.
            tensors[f"{prefix}.{name}.weight"] = random(*size, scale=size[1] ** -0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = VOCAB_SIZE - len(special) - len(alphabet)
    merges = list(itertools.islice(itertools.product(alphabet, alphabet), num_pairs))
    words = [*special, *alphabet, *(a + b for a, b in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(path / "tokenizer.json"))
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
