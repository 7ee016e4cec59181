"""The command line. Flags are read in this module and its siblings, nowhere else.

Heavy imports wait until a command needs them, so that ``--help`` and errors in flags are answered
at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from quire import __version__
from quire.cluster.cli.adapter import add_adapter_parser
from quire.cluster.cli.admin import add_admin_parser
from quire.cluster.cli.bench import add_bench_parser
from quire.cluster.cli.chat import add_chat_parser
from quire.cluster.cli.cluster import add_cluster_flags, add_serve_flags, cluster_config
from quire.cluster.cli.doctor import add_doctor_parser
from quire.cluster.cli.explain import add_explain_parser
from quire.cluster.cli.flags import with_flags
from quire.cluster.cli.help import (
    SHORT_USAGE,
    DefaultsFormatter,
    Parser,
    add_model_flag,
    add_server_flags,
    server_of,
)
from quire.cluster.cli.info import add_info_parsers
from quire.cluster.cli.keys import add_keys_parser
from quire.cluster.cli.logs import add_logs_parser
from quire.cluster.cli.model import add_model_parser
from quire.cluster.cli.run_batch import add_run_batch_parser
from quire.cluster.cli.simulate import add_simulate_parser
from quire.cluster.cli.status import add_status_parser
from quire.cluster.cli.stop import add_stop_parser
from quire.cluster.cli.top import add_top_parser
from quire.cluster.cli.upgrade import add_upgrade_parser
from quire.cluster.cli.vllm_flags import translated
from quire.cluster.deploy.kept_keys import kept_keys
from quire.cluster.deploy.progress import on_stdout
from quire.cluster.deploy.signals import ended_by_signal
from quire.worker.request.errors import CheckpointError, ConfigError, InvalidRequest, QuireError

_BAD_USAGE = (ConfigError, CheckpointError, InvalidRequest)
"""Errors that the user can fix: printed like argparse's errors, with the same exit status."""
_EXTRA = {
    "aiohttp": "aiohttp",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "prometheus_client": "prometheus-client",
    "pydantic": "pydantic",
    "ray": "ray[serve]",
    "shtab": "shtab",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
}
"""Packages of the extra ``cluster``, by imported module."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    arguments = _parser().parse_args(argv)
    # Our own messages report failed connections. gRPC reads this variable when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except QuireError as error:
        for note in getattr(error, "__notes__", ()):  # Remote tracebacks, places of logs.
            print(note, file=sys.stderr)
        message = str(error)
        if isinstance(error, _BAD_USAGE) and getattr(arguments, "config", "") is None:
            message = with_flags(message, arguments.flags)
        print(f"quire: {message}", file=sys.stderr)
        return 2 if isinstance(error, _BAD_USAGE) else 1
    # The reader of the pipe, such as `head`, has closed it.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For output still to come.
        return 1
    except ModuleNotFoundError as error:
        package = _EXTRA.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        print(
            f"quire: {package} is not installed, which this command needs; pip install "
            "'quire-serve[cluster]' installs all that a cluster needs, and so does pip install "
            "'.[cluster]' in a clone of Quire's repository",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.filename is None:
            raise  # Not a user's file: a bug of ours, or of Ray's.
        print(f"quire: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="quire", description="Serve a language model on a Ray cluster, or ask one."
    )
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        usage=SHORT_USAGE,
        help="serve a model over gRPC and the OpenAI HTTP API until Ctrl-C",
        description="Serves a model over gRPC and the OpenAI HTTP API until Ctrl-C.",
        formatter_class=DefaultsFormatter,
    )
    add_serve_flags(serve)
    serve.spellings = translated
    serve.reads_environment = True
    serve.set_defaults(run=_serve)

    demo = commands.add_parser(
        "demo",
        usage=SHORT_USAGE,
        help="start a cluster here, ask it a few questions, show timings and reuse, stop it",
        description="Starts a cluster on this machine with two replica groups of two ranks, asks "
        "questions that share a system prompt, shows what each cost, and stops it.",
        formatter_class=DefaultsFormatter,
    )
    add_cluster_flags(
        demo,
        defaults={
            "num_groups": 2,
            "engine": {"tensor_parallel_size": 2},
            "grpc_port": 0,
            "http_port": 0,
        },
    )
    demo.set_defaults(run=_demo)

    add_upgrade_parser(commands)
    add_model_parser(commands)
    add_stop_parser(commands)
    add_status_parser(commands)
    add_top_parser(commands)
    add_logs_parser(commands)
    generate = commands.add_parser(
        "generate",
        help="send a prompt to a running server and print the text as it arrives",
        description="Sends a prompt to a running server and prints the text as it arrives. "
        "Where the server wants an API key, it is read from QUIRE_API_KEY.",
        formatter_class=DefaultsFormatter,
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    add_server_flags(generate)
    add_model_flag(generate)
    generate.add_argument("--system", help="a system message; the prompt is then a chat turn")
    generate.add_argument("--chat", action="store_true", help="send the prompt as a chat turn")
    generate.add_argument("--max-tokens", type=int, default=128, help="most tokens of the text")
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token"
    )
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens up to this sum"
    )
    generate.add_argument("--seed", type=int, help="seed that repeats a text")
    generate.set_defaults(run=_generate)

    add_chat_parser(commands)
    add_explain_parser(commands)
    add_admin_parser(commands)
    add_adapter_parser(commands)
    add_keys_parser(commands)
    add_doctor_parser(commands)
    add_run_batch_parser(commands)
    add_bench_parser(commands)
    add_simulate_parser(commands)
    add_info_parsers(commands, parser)
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    from quire.cluster.cli.sources import check_paths, read_cluster

    sources = read_cluster(arguments)
    if arguments.print_config is not None:
        from quire.cluster.cli.print_config import printed

        print(printed(arguments, sources, everything=arguments.print_config == "all"), end="")
        return 0
    check_paths(sources.config)
    # The imports alone take seconds.
    with ended_by_signal(), kept_keys(arguments.api_keys), on_stdout() as progress:
        with progress.step("imports"):
            from quire.cluster.deploy.app import serve_until_signal

        serve_until_signal(
            sources.config,
            name=arguments.name,
            ray_address=arguments.ray_address,
            status_every_s=arguments.status_interval_s,
            progress=progress,
        )
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    with ended_by_signal(), kept_keys(arguments.api_keys), on_stdout() as progress:
        with progress.step("imports"):
            from quire.cluster.cli.demo import run_demo

        return run_demo(
            cluster_config(arguments),
            name=arguments.name,
            ray_address=arguments.ray_address,
            progress=progress,
        )


def _generate(arguments: argparse.Namespace) -> int:
    from quire.cluster.client import generate_to_stdout

    return generate_to_stdout(
        _text("prompt", _piped() if arguments.prompt == "-" else arguments.prompt),
        server=server_of(arguments),
        model=arguments.model,
        system=None if arguments.system is None else _text("system", arguments.system),
        chat=arguments.chat or arguments.system is not None,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )


def _piped() -> str:
    """Standard input as UTF-8 in any locale; invalid bytes become surrogates, as in arguments."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")


def _text(name: str, given: str) -> str:
    """``given``. Raises InvalidRequest if it has bytes that are not text."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name}: is not UTF-8 at character {error.start}") from error
    return given
