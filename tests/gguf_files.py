"""Writes models of transformers as GGUF files, with the writer and the tensor names of the package
``gguf``. Values are changed as llama.cpp's converter changes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

INTERLEAVED = ("llama", "smollm3")
LESS_ONE = ("gemma2", "gemma3")
WORDS = [chr(256 + byte) if byte <= 0x20 else chr(byte) for byte in range(0x7F)]
"""The ASCII characters in GPT-2's byte-level spelling."""


def write_model(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    *,
    kind: Kind = Kind.F32,
    fields: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    split_after: int = 0,
    vocabulary: bool = True,
) -> None:
    """Writes ``model`` with matrices quantised as ``kind``; sets the model to the written values.

    ``fields`` are metadata of the architecture, ``tensors`` extra tensors. After ``split_after``
    tensors a second file begins.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_after)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    for name, value in (fields or {}).items():
        add: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32}
        add[str] = writer.add_string
        add[type(value)](f"{architecture}.{name}", value)
    if vocabulary:
        add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(
        next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    state = model.state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    for name, value in state.items():
        for renamed, part in _parts(names, name, value):
            values = part.float().numpy()
            is_norm = architecture in LESS_ONE and name.endswith("norm.weight")
            values = values + 1 if is_norm else values
            heads = 0
            if architecture in INTERLEAVED and ".attn_q." in renamed:
                heads = config.num_attention_heads
            elif architecture in INTERLEAVED and ".attn_k." in renamed:
                heads = config.num_key_value_heads
            if heads:  # Llama's original order: the two channels of a rotary pair are neighbours.
                values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)
                values = np.ascontiguousarray(values).reshape(part.shape)
            stored = Kind.F32 if values.ndim == 1 else kind
            raw = quantize(np.ascontiguousarray(values), stored)
            writer.add_tensor(renamed, raw, raw_dtype=stored)
            values = dequantize(raw, stored).reshape(values.shape)
            if heads:
                values = values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2)
            values = values - 1 if is_norm else values
            part.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(part.shape))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    finish(writer)


def _parts(names: Any, name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor under its name in the file, or its parts under theirs."""
    stem, _, last = name.rpartition(".")
    if last == "gate_up_proj":  # Gate and up of all experts, stacked.
        for part, kind in zip(value.chunk(2, 1), ("gate", "up"), strict=True):
            yield f"blk.{stem.split('.')[2]}.ffn_{kind}_exps.weight", part
    elif last == "down_proj":
        yield f"blk.{stem.split('.')[2]}.ffn_down_exps.weight", value
    else:
        renamed = names.get_name(stem)
        assert renamed is not None, name
        yield f"{renamed}.{last}", value


def write_tiny(path: Path, *, kind: Kind = Kind.Q8_0, **options: Any) -> Any:
    """Writes a Llama of one layer and returns the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    write_model(path, model, "llama", kind=kind, **options)
    return model


def add_vocabulary(writer: Any, size: int) -> None:
    """Adds ``<s>``, ``</s>``, a turn marker, ASCII, "hi", and unused tokens up to ``size``."""
    words = ["<s>", "</s>", "<|im_end|>", *WORDS, "hi"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(words) - 3)
    missing = range(len(words), size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*words, *(f"[PAD{place}]" for place in missing)])
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in missing)])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}<|im_end|>{% endfor %}")


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
