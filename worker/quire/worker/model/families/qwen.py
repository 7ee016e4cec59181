"""Qwen2, with biases of Q, K and V, and Qwen3, with norms of each head of Q and K."""

from quire.worker.model.families.decoder import attention, decoder, mlp, windows, with_windows
from quire.worker.model.spec import ModelSpec
from quire.worker.weights.fields import Fields


def qwen2(config: Fields) -> ModelSpec:
    return decoder(
        config,
        attention=with_windows(attention(config, qkv_bias=True), windows(config)),
        mlp=mlp(config),
    )


def qwen3(config: Fields) -> ModelSpec:
    bias = config.flag("attention_bias")
    one = attention(config, head_size=128, qk_norm="head", qkv_bias=bias, o_bias=bias)
    return decoder(
        config,
        attention=with_windows(one, windows(config)),
        mlp=mlp(config),
        knows=("use_qk_norm",),  # Qwen3 always has these norms.
    )
