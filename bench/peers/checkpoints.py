"""The checkpoints that all engines are measured on: random weights in Llama shapes of three sizes,
and in the shapes of models that people run.

A checkpoint is made once and found again by its name; its bits depend on its name alone. Weights
are bfloat16, so that every engine reads the same values whatever it computes in. The tokenizer is
a byte-level BPE of the same 32,000 entries for all: every byte, then pairs of bytes. A model may
have a larger vocabulary; prompts come from the first 32,000.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Whether the LM head shares the embedding's weights."""
    vocab_size: int = VOCAB_SIZE
    num_requests: int
    num_experts: int = 0
    config: Mapping[str, object] = field(default_factory=dict)
    """Entries of config.json that are not Llama's; empty for a Llama."""

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices, those of all experts among them."""
        q, kv = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        attention = self.hidden_size * (2 * q + 2 * kv)
        mlps = 3 * self.hidden_size * self.intermediate_size * max(1, self.num_experts)
        return self.num_layers * (attention + mlps)

    @property
    def head_weights(self) -> int:
        return self.hidden_size * self.vocab_size

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
        Shape(
            name="qwen3-0.6b",
            hidden_size=1024,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_size=128,
            intermediate_size=3072,
            tied=True,
            vocab_size=151_936,
            num_requests=8,
            config={
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0,
            },
        ),
        Shape(
            name="llama-3.2-1b",
            hidden_size=2048,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_size=64,
            intermediate_size=8192,
            tied=True,
            vocab_size=128_256,
            num_requests=8,
            config={
                "max_position_embeddings": 16_384,  # llama3's RoPE wants more than the original.
                "rope_theta": 500_000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "high_freq_factor": 4.0,
                    "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 8192,
                },
            },
        ),
        Shape(
            name="gemma-3-1b",
            hidden_size=1152,
            num_layers=26,
            num_heads=4,
            num_kv_heads=1,
            head_size=256,
            intermediate_size=6912,
            tied=True,
            vocab_size=262_144,
            num_requests=8,
            config={
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "rms_norm_eps": 1e-6,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "query_pre_attn_scalar": 256,
                "sliding_window": 512,
                "sliding_window_pattern": 6,
                "hidden_activation": "gelu_pytorch_tanh",
            },
        ),
        Shape(
            name="olmoe-like",  # OLMoE-1B-7B with 4 of its 16 layers.
            hidden_size=2048,
            num_layers=4,
            num_heads=16,
            num_kv_heads=16,
            head_size=128,
            intermediate_size=1024,
            vocab_size=50_304,
            num_requests=8,
            num_experts=64,
            config={
                "architectures": ["OlmoeForCausalLM"],
                "model_type": "olmoe",
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
        ),
    )
}
SIZES = ("S", "M", "L")
"""The Llama shapes that are measured unless others are asked for."""


def make_checkpoint(shape: Shape, folder: Path) -> Path:
    """The checkpoint's absolute directory under ``folder``, written if it is not there yet."""
    path = folder.absolute() / f"random-{shape.name}-{shape.num_parameters / 1e6:.0f}M"
    if not (path / "config.json").is_file():
        part = path.with_name(path.name + ".part")
        part.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(part)
        _write_model(shape, part)
        (part / "config.json").write_text(json.dumps(config_entries(shape), indent=1) + "\n")
        part.rename(path)
    return path


def config_entries(shape: Shape) -> dict[str, object]:
    """The entries of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
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
        **shape.config,
    }


def _write_model(shape: Shape, path: Path) -> None:
    """Random weights under the names of transformers,; norms do nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = config_entries(shape)
    model_config = AutoConfig.for_model(str(entries.pop("model_type")), **entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, dtype=torch.bfloat16
        )
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(shape.num_parameters)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.data.fill_(0 if "gemma" in model_config.model_type else 1)
        else:
            # So large beside the embedding that a tied head does not just repeat the last token.
            scale = 0.02 if "embed" in name else weight.shape[-1] ** -0.5
            weight.data.normal_(std=scale, generator=generator)
    model.tie_weights()
    model.save_pretrained(path)


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
