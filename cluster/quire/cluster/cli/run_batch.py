"""``quire run-batch``: answers a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

from quire.cluster.cli.cluster import add_cluster_flags, cluster_config
from quire.cluster.cli.help import DefaultsFormatter, Parser
from quire.cluster.cli.vllm_flags import translated

_TELL_EVERY_S = 1.0


def add_run_batch_parser(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds ``run-batch`` to the command line."""
    help_text = "answer a file of requests in OpenAI's batch format"
    batch = commands.add_parser(
        "run-batch",
        usage="%(prog)s -i FILE -o FILE [--server URL | MODEL [flags]]",
        help=help_text,
        description=f"{help_text.capitalize()}: by a server that runs, or by a cluster that is "
        "started here for it, with the flags of `quire serve`. Ends with status 1 where a request "
        "failed. Where the server wants an API key, it is read from QUIRE_API_KEY.",
        formatter_class=DefaultsFormatter,
    )
    add = batch.add_argument
    add("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one a line")
    add("-o", "--output-file", type=Path, required=True, metavar="FILE", help="where answers go")
    add("--server", metavar="URL", help="one that runs, such as http://127.0.0.1:8000")
    add("--max-concurrency", type=_positive, default=256, help="requests under way at a time")
    add(
        "--resume",
        action="store_true",
        help="ask only what an earlier run, which may have been broken off, has not answered well",
    )
    add_cluster_flags(batch, num_groups=1, tensor_parallel_size=1)
    batch.spellings = translated
    batch.set_defaults(run=_run, grpc_port=0, http_port=0)


def _run(arguments: argparse.Namespace) -> int:
    from quire.cluster.batch import check_file

    num = check_file(arguments.input_file)
    if arguments.server is not None:
        return _answer(arguments, arguments.server, num)
    from quire.cluster.deploy.progress import on_stdout
    from quire.cluster.deploy.signals import ended_by_signal

    config = cluster_config(arguments)
    with ended_by_signal(), on_stdout() as progress:
        with progress.step("imports"):
            from quire.cluster.deploy.app import running_cluster
        cluster = running_cluster(
            config, name=arguments.name, ray_address=arguments.ray_address, progress=progress
        )
        with cluster as endpoints:
            scheme = "https" if config.tls_certificate else "http"
            return _answer(arguments, f"{scheme}://{endpoints.http}", num)


def _answer(arguments: argparse.Namespace, server: str, num: int) -> int:
    from quire.cluster.batch import run_file

    begin_s = told_s = time.monotonic()

    def done(num_done: int) -> None:
        nonlocal told_s
        if sys.stderr.isatty() and time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            print(f"\r\x1b[K{num_done:,} of {num:,} answered", end="", file=sys.stderr, flush=True)

    ended = asyncio.run(
        run_file(
            arguments.input_file,
            arguments.output_file,
            server=server,
            api_key=os.environ.get("QUIRE_API_KEY"),
            max_concurrency=arguments.max_concurrency,
            resumes=arguments.resume,
            done=done,
        )
    )
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(
        f"{ended.num_done:,} requests in {time.monotonic() - begin_s:.1f} s, {ended.num_failed:,} "
        f"failed, {ended.num_skipped:,} answered before: {arguments.output_file}"
    )
    return 1 if ended.num_failed else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 or more")
    return number
