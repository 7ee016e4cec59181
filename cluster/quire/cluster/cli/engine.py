"""The engine flags of every command that starts one, and the `EngineConfig` they make."""

import argparse
from typing import get_args

from quire.kernels.quantization import KvCacheDType, Quantization
from quire.worker.api.config import Device, DType, EngineConfig, ModelImpl

MODEL_HELP = (
    "a checkpoint directory, a GGUF file, or ORG/NAME[/FILE.gguf][@REVISION] of the Hugging Face "
    "hub; without one, the demo model"
)


def add_engine_flags(
    parser: argparse.ArgumentParser, *, tensor_parallel_size: int
) -> "argparse._ArgumentGroup":
    """Adds them to a command, which may add more to the group that it gets."""
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=tensor_parallel_size,
        help="ranks of an engine, a replica group's or the one here",
    )
    add(
        "--dtype",
        choices=get_args(DType),
        default="auto",
        help="type of weights, activations and KV; auto is the checkpoint's own",
    )
    add(
        "--model-impl",
        choices=get_args(ModelImpl),
        default="auto",
        help="what computes the model: quire's kernels or transformers' modules; auto is "
        "transformers for architectures that quire has no description of",
    )
    add(
        "--quantization",
        choices=get_args(Quantization),
        help="int8: 8 bits in linear layers; w4: weights of 4 bits; neither if absent",
    )
    add(
        "--kv-cache-dtype",
        choices=get_args(KvCacheDType),
        default="auto",
        help="type of KV alone; int8 (CPU) and fp8 (GPU) take half the memory of 16 bits",
    )
    add(
        "--device",
        choices=get_args(Device),
        default="auto",
        help="auto is cuda where there is one, else cpu",
    )
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on a GPU, only matrix products in which a row's bits do not depend on the batch",
    )
    add("--max-num-seqs", type=int, default=128, help="sequences that run at the same time")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens in a step")
    add(
        "--num-threads",
        type=int,
        help="CPU threads of each rank; the cores are shared out if absent",
    )
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="prepare the next step while one runs; on GPUs if absent",
    )
    add(
        "--speculation",
        action=argparse.BooleanOptionalAction,
        help="compute guessed tokens too where few sequences run, which changes no token; on CPUs "
        "if absent",
    )
    return group


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's configuration from the flags; without a model, the demo model.

    Raises:
        ConfigError: They cannot work; the message names what and why.
    """
    from quire import demo_model

    return EngineConfig(
        model=arguments.model or demo_model.PATH,
        model_impl=arguments.model_impl,
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        device=arguments.device,
        deterministic=arguments.deterministic,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        num_threads=arguments.num_threads,
        async_scheduling=arguments.async_scheduling,
        speculation=arguments.speculation,
    )
