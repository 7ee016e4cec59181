"""The engine flags of every command that starts one, and their conversion to an `EngineConfig`."""

import argparse
from pathlib import Path

from quire.cluster.cli.fields import Flags, add_fields, given_fields
from quire.worker.request.config import EngineConfig

MODEL_HELP = (
    "a checkpoint directory, a GGUF file, or ORG/NAME[/FILE.gguf][@REVISION] of the Hugging Face "
    "hub; without one, the demo model"
)
_HELPS = {
    "dtype": "type of weights, activations and KV; auto is the checkpoint's own",
    "model_impl": "implementation of the model: Quire's kernels or transformers' modules; auto is "
    "transformers for architectures that Quire does not describe",
    "quantization": "int8: linear layers in 8 bits; w4: weights in 4 bits; none if absent",
    "kv_cache_dtype": "type of the KV cache; int8 (CPU) and fp8 (GPU) take half as much as 16 bits",
    "device": "auto is cuda if there is a GPU, else cpu",
    "deterministic": "on a GPU, use only batch-invariant matrix products",
    "max_num_seqs": "most sequences that run at the same time",
    "max_num_batched_tokens": "most tokens in a step",
    "enable_lora": "serve LoRA adapters of the model",
    "max_loras": "most different adapters in a step; more take turns",
    "max_lora_rank": "greatest rank of an adapter, 256 at most",
    "max_cpu_loras": "adapters kept in memory; four times --max-loras if absent",
    "num_threads": "CPU threads of each rank; if absent, the cores are divided among the ranks",
    "async_scheduling": "prepare the next step while one runs; if absent, on for GPUs",
    "speculation": "speculative decoding without a draft model when few sequences run, which "
    "changes no token; if absent, on for CPUs",
}


def add_engine_flags(parser: argparse.ArgumentParser, *, tensor_parallel_size: int) -> Flags:
    """Adds the engine flags to a command, which may add more flags to the returned group."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=tensor_parallel_size,
        help="tensor-parallel ranks of each engine",
    )
    add_fields(group, EngineConfig, _HELPS)
    return group


def engine_config(arguments: argparse.Namespace, model: Path | None) -> EngineConfig:
    """The configuration of the engine of ``model`` from the flags; without a model, the demo
    model's.

    Raises:
        ConfigError: The flags cannot work; the message names the flag and the reason.
    """
    from quire import demo_model

    given = given_fields(EngineConfig, arguments)
    if given.get("kv_disk_dir") is not None:  # Groups run in other working directories.
        given["kv_disk_dir"] = given["kv_disk_dir"].absolute()
    return EngineConfig(**given | {"model": model or demo_model.PATH})
