"""The command line: flags are read here and in the `cli_` modules beside, nowhere else.

Heavy imports wait until a command needs them, so that ``--help`` and a mistyped flag answer at
once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import get_args

from quire.cluster.autoscaling_settings import AutoscalingSettings
from quire.cluster.cli_bench import add_bench_parser
from quire.cluster.cli_explain import add_explain_parser
from quire.cluster.cli_help import DefaultsFormatter
from quire.cluster.cli_simulate import add_simulate_parser
from quire.cluster.config import ClusterConfig
from quire.kernels.quantization import KvCacheDType, Quantization
from quire.router.config import RoutingConfig
from quire.router.policy_names import POLICY_NAMES
from quire.worker.config import BLOCK_SIZES, Device, DType, EngineConfig
from quire.worker.errors import ConfigError, QuireError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire", description="Serve a language model on a Ray cluster, or ask one."
    )
    parser.add_argument("--version", action="version", version=f"quire {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve a model over gRPC and the OpenAI HTTP API until Ctrl-C",
        description="Serves a model over gRPC and the OpenAI HTTP API until Ctrl-C.",
        formatter_class=DefaultsFormatter,
    )
    _add_cluster_flags(serve, num_groups=1, tensor_parallel_size=1)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser(
        "demo",
        help="start a cluster here, ask it a few questions, show what that cost, stop it",
        description="Starts a cluster on this machine with two replica groups of two ranks, asks "
        "questions that share a system prompt, shows what each cost, and stops it.",
        formatter_class=DefaultsFormatter,
    )
    _add_cluster_flags(demo, num_groups=2, tensor_parallel_size=2)
    demo.set_defaults(run=_demo, grpc_port=0, http_port=0)

    generate = commands.add_parser(
        "generate",
        help="send a prompt to a running server and print the text as it arrives",
        description="Sends a prompt to a running server and prints the text as it arrives. "
        "Where the server wants an API key, it is read from QUIRE_API_KEY.",
        formatter_class=DefaultsFormatter,
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument("--address", default="127.0.0.1:50051", help="of the gRPC server")
    generate.add_argument(
        "--tls", action="store_true", help="the server has TLS, with a well-known authority"
    )
    generate.add_argument(
        "--tls-ca", type=Path, help="the server has TLS, with this authority (PEM)"
    )
    generate.add_argument("--system", help="a system message; the prompt is then a chat turn")
    generate.add_argument("--chat", action="store_true", help="send the prompt as a chat turn")
    generate.add_argument("--max-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--seed", type=int, help="for the same text again")
    generate.set_defaults(run=_generate)

    add_explain_parser(commands)
    add_bench_parser(commands)
    add_simulate_parser(commands)
    return parser


def _add_cluster_flags(
    parser: argparse.ArgumentParser, *, num_groups: int, tensor_parallel_size: int
) -> None:
    parser.add_argument(
        "model", nargs="?", type=Path, help="a checkpoint directory; without one, the demo model"
    )
    add = parser.add_argument
    add("--served-model-name", help="what clients call the model; the directory's name if absent")
    add("--num-groups", type=int, default=num_groups, help="replica groups, where it is fixed")
    add("--max-groups", type=int, help="start and stop groups with the load, up to so many")
    add("--min-groups", type=int, help="and down to so many; 0 stops the last one too [1]")
    add("--target-ttft-s", type=float, help="how long prompts may wait for their turn [2]")
    add(
        "--tensor-parallel-size",
        "-tp",
        type=int,
        default=tensor_parallel_size,
        help="ranks in each group",
    )
    add("--num-gateways", type=int, default=1, help="gateways")
    add("--host", default="127.0.0.1", help="where clients connect; 0.0.0.0 serves the network")
    add("--grpc-port", type=int, default=50051, help="0 takes any free one")
    add("--http-port", type=int, default=8000, help="0 takes any free one")
    add("--group-host", default="127.0.0.1", help="where groups listen for gateways")
    add("--tls-certificate", type=Path, help="the gateways' certificate chain, PEM; with --tls-key")
    add("--tls-key", type=Path, help="its private key, PEM")
    add("--api-keys-file", type=Path, help="one API key a line: clients must then show one")
    _add_routing_flags(parser)
    add("--ray-address", help="of a running Ray cluster ('auto' finds it); else one starts here")
    add(
        "--max-queue-wait-s",
        type=float,
        default=10.0,
        help="a request that would wait for longer for its turn is refused",
    )
    add(
        "--standing-wait-s",
        type=float,
        default=1.0,
        help="the same, once no request has found a free group for as long as this",
    )
    add("--drain-timeout-s", type=float, default=30.0, help="for running requests at the stop")
    add("--dtype", choices=get_args(DType), default="auto")
    add("--quantization", choices=get_args(Quantization), help="of linear layers; none if absent")
    add("--kv-cache-dtype", choices=get_args(KvCacheDType), default="auto")
    add("--device", choices=get_args(Device), default="auto")
    add("--block-size", type=int, choices=BLOCK_SIZES, default=16, help="tokens in a KV block")
    add("--gpu-memory-utilization", type=float, help="share of GPU memory, or of free RAM")
    add("--kv-cache-memory-bytes", type=int, help="KV cache of each group, instead of a share")
    add("--max-model-len", type=int, help="longest prompt + output; the model's own if absent")
    add("--max-num-seqs", type=int, default=128, help="sequences that run at the same time")
    add("--max-num-batched-tokens", type=int, default=2048, help="tokens in a step")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="reuse the KV of prompts that begin alike",
    )
    add("--num-threads", type=int, help="CPU threads of each rank")
    add(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="prepare the next step while one runs; on GPUs if absent",
    )
    add("--enforce-eager", action="store_true", help="no CUDA graphs")
    add("--seed", type=int, default=0)


def _add_routing_flags(parser: argparse.ArgumentParser) -> None:
    listed = "; ".join(f"{name}: {what}" for name, what in POLICY_NAMES.items())
    add = parser.add_argument_group(
        "routing", f"Which group takes a request. The policies are {listed}."
    ).add_argument
    add("--routing-policy", choices=POLICY_NAMES, default="prefix_aware", metavar="POLICY")
    add(
        "--directory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="know what each group has cached; without, route by load alone",
    )


def _serve(arguments: argparse.Namespace) -> int:
    from quire.cluster.app import serve_until_signal

    serve_until_signal(_cluster_config(arguments), ray_address=arguments.ray_address)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from quire.cluster.demo import run_demo

    return run_demo(_cluster_config(arguments), ray_address=arguments.ray_address)


def _generate(arguments: argparse.Namespace) -> int:
    from quire.cluster.client import Server, generate_to_stdout

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    return generate_to_stdout(
        prompt,
        server=Server(
            address=arguments.address,
            tls=arguments.tls,
            tls_ca=arguments.tls_ca,
            api_key=os.environ.get("QUIRE_API_KEY"),
        ),
        system=arguments.system,
        chat=arguments.chat or arguments.system is not None,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


def _cluster_config(arguments: argparse.Namespace) -> ClusterConfig:
    model, name = arguments.model, arguments.served_model_name
    if model is None:
        from quire import demo_model

        model, name = demo_model.PATH, name or demo_model.NAME
    engine = EngineConfig(
        model=model,
        tensor_parallel_size=arguments.tensor_parallel_size,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
        device=arguments.device,
        block_size=arguments.block_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        enable_prefix_caching=arguments.enable_prefix_caching,
        num_threads=arguments.num_threads,
        async_scheduling=arguments.async_scheduling,
        enforce_eager=arguments.enforce_eager,
        seed=arguments.seed,
    )
    return ClusterConfig(
        engine=engine,
        routing=RoutingConfig(policy=arguments.routing_policy, use_directory=arguments.directory),
        served_model_name=name,
        num_groups=arguments.num_groups,
        autoscaling=_autoscaling(arguments),
        num_gateways=arguments.num_gateways,
        host=arguments.host,
        grpc_port=arguments.grpc_port,
        http_port=arguments.http_port,
        group_host=arguments.group_host,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
        api_keys_file=arguments.api_keys_file,
        max_queue_wait_s=arguments.max_queue_wait_s,
        standing_wait_s=arguments.standing_wait_s,
        drain_timeout_s=arguments.drain_timeout_s,
    )


def _autoscaling(arguments: argparse.Namespace) -> AutoscalingSettings | None:
    names = ("min_groups", "max_groups", "target_ttft_s")
    given = {name: getattr(arguments, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if "max_groups" not in given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{flags}: --max-groups must say up to how many groups there may be")
    return AutoscalingSettings(**given)


def _version() -> str:
    try:
        return version("quire")
    except PackageNotFoundError:
        return "(not installed)"
