"""StarCoder2: layer norms, and an MLP without a gate."""

from quire.worker.model.families.decoder import attention, decoder, mlp
from quire.worker.model.spec import ModelSpec, Norm, TensorNames
from quire.worker.weights.fields import Fields


def starcoder2(config: Fields) -> ModelSpec:
    bias = config.flag("use_bias", default=True)
    window = config.raw.get("sliding_window") and config.count("sliding_window")
    return decoder(
        config,
        attention=attention(config, window=window, qkv_bias=bias, o_bias=bias),
        mlp=mlp(config, activation="gelu_pytorch_tanh", gated=False, bias=bias),
        norm=Norm(kind="layer", bias=True, eps=config.number("norm_epsilon", default=1e-5)),
        tied=config.flag("tie_word_embeddings", default=True),
        names=TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
    )
