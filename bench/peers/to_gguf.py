"""Writes a checkpoint of ours as the GGUF file that llama.cpp reads.

    python to_gguf.py CHECKPOINT bfloat16|float32|int8|w4 TARGET    -> TARGET/model.gguf

Runs in the environment of the peer `llamacpp`. llama.cpp rotates neighbouring channels of a head
where Hugging Face rotates channel i with channel i + D / 2: rows of Q and K change their order.
Norms are float32, as everywhere in GGUF; int8 is Q8_0 and w4 is Q4_0, a scale for every 32 weights.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as types
from gguf import quants

Bits = npt.NDArray[np.uint16]
"""A tensor of bfloat16, as numpy has no type for it."""

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


_QUANTIZED = {"int8": types.Q8_0, "w4": types.Q4_0}


def main() -> None:
    checkpoint, dtype, target = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(target / "model.gguf", "llama")
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    for name, bits in _tensors(checkpoint / "model.safetensors").items():
        renamed = _renamed(name)
        for projection in ("attn_q", "attn_k"):
            if f".{projection}." in renamed:
                bits = _interleaved(bits, head_size=config["head_dim"])
        values = (bits.astype(np.uint32) << 16).view(np.float32)
        if dtype == "float32" or bits.ndim == 1:
            writer.add_tensor(renamed, values)
        elif dtype in _QUANTIZED:
            kind = _QUANTIZED[dtype]
            writer.add_tensor(renamed, quants.quantize(values, kind), raw_dtype=kind)
        else:
            # With a type of its own the writer takes bytes, and makes the shape from theirs.
            writer.add_tensor(renamed, bits.view(np.uint8), raw_dtype=types.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: Any, tokenizer: dict[str, Any]) -> None:
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=lambda word: vocabulary[word]))
    writer.add_token_types(
        [kinds.CONTROL] * len(special) + [kinds.NORMAL] * (len(vocabulary) - len(special))
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(special["<s>"])
    writer.add_eos_token_id(special["</s>"])


def _tensors(file: Path) -> dict[str, Bits]:
    """All tensors of a safetensors file, which are bfloat16."""
    raw = np.memmap(file, np.uint8, "r")
    (length,) = struct.unpack("<Q", raw[:8].tobytes())
    header = json.loads(raw[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = raw[first:last].view(np.uint16).reshape(entry["shape"])
    return tensors


def _renamed(name: str) -> str:
    parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{NAMES[parts[2]]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[
        parts[0]
    ] + ".weight"


def _interleaved(bits: Bits, *, head_size: int) -> Bits:
    heads = bits.reshape(-1, 2, head_size // 2, bits.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(bits.shape)


if __name__ == "__main__":
    main()
