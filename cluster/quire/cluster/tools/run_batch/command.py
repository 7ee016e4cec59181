"""``quire run-batch``: answers a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from quire.cluster.cli.cluster import add_cluster_flags, cluster_config
from quire.cluster.cli.flags import add_settings, given_settings
from quire.cluster.cli.help import Parser, whole
from quire.cluster.cli.vllm_flags import translated
from quire.cluster.tools.run_batch.file import Limits, check_file, part_of
from quire.worker.request.errors import ConfigError

_TELL_EVERY_S = 1.0


def add_flags(parser: Parser) -> None:
    parser.usage = "%(prog)s -i FILE -o FILE [--server URL | MODEL [flags]]"
    parser.description = (
        "Answer a file of requests in OpenAI's batch format, with a running server, or with a "
        "cluster that is started for it, with the flags of `quire serve`. The exit status is 1 if "
        "a request failed."
    )
    # The flags of `serve` set a server's keys; `--api-key` here is a client's, and replaces that.
    parser._optionals.conflict_handler = "resolve"
    add = parser.add_argument
    add(
        "-i",
        "--input-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="requests, one per line",
    )
    add(
        "-o", "--output-file", type=Path, required=True, metavar="FILE", help="file for the answers"
    )
    add("--server", metavar="URL", help="a running server, such as http://127.0.0.1:8000")
    add("--max-concurrency", type=whole(least=1), default=256, help="most requests at a time")
    add(
        "--resume",
        action="store_true",
        help="only send requests without a successful answer in an earlier, perhaps aborted, run",
    )
    add_settings(parser, Limits)
    add_cluster_flags(parser, defaults={"grpc_port": 0, "http_port": 0})
    add("--api-key", help="API key for --server; if absent, the variable QUIRE_API_KEY")
    parser.spellings = translated
    parser.set_defaults(run=_run, api_keys=None)


def _run(arguments: argparse.Namespace) -> int:
    server = None if arguments.server is None else _address(arguments)
    if server is None and arguments.api_key:
        raise ConfigError("--api-key: is of --server; a cluster that is started here wants none")
    _check_output(arguments)
    limits = Limits(**given_settings(arguments, Limits))
    asked = check_file(arguments.input_file, limits)
    if server is not None:
        api_key = arguments.api_key or os.environ.get("QUIRE_API_KEY")
        return _answer(arguments, server, asked, limits, api_key=api_key)
    from quire.cluster.deploy.progress import on_stdout
    from quire.cluster.deploy.signals import ended_by_signal

    # Serves only this file: on this machine, without keys or certificates.
    config = replace(
        cluster_config(arguments),
        host="127.0.0.1",
        tls_certificate=None,
        tls_key=None,
        api_keys_file=None,
        open_metrics=False,
    )
    with ended_by_signal(), on_stdout() as progress:
        with progress.step("imports"):
            from quire.cluster.deploy.app import running_cluster
        cluster = running_cluster(
            config, name=arguments.name, ray_address=arguments.ray_address, progress=progress
        )
        with cluster as endpoints:
            return _answer(arguments, f"http://{endpoints.http}", asked, limits, api_key=None)


def _address(arguments: argparse.Namespace) -> str:
    """The base of the server's URLs, without the ``/v1`` that OpenAI's clients may append."""
    if arguments.model:
        raise ConfigError(
            f"model={arguments.model[0]}: the server has its own: leave out MODEL, or --server"
        )
    given: str = arguments.server
    url = given if "://" in given else f"http://{given}"
    url = url.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path or parts.query:
        raise ConfigError(f"server={given}: must be such as http://127.0.0.1:8000")
    return url


def _check_output(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if answers could not be written, or would overwrite others."""
    target: Path = arguments.output_file
    if target.resolve() == arguments.input_file.resolve():
        raise ConfigError(f"output_file={target}: is the input too: name another")
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"output_file={target}: must be a file in a folder that is there")
    if part_of(target).exists() and not arguments.resume:
        raise ConfigError(
            f"output_file={target}: an earlier run left {part_of(target)}: --resume goes on with "
            "it, or delete it"
        )


def _answer(
    arguments: argparse.Namespace,
    server: str,
    asked: set[bytes],
    limits: Limits,
    *,
    api_key: str | None,
) -> int:
    from quire.cluster.tools.run_batch.run import run_file

    begin_s = told_s = time.monotonic()

    def done(num_done: int) -> None:
        nonlocal told_s
        if sys.stderr.isatty() and time.monotonic() - told_s >= _TELL_EVERY_S:
            told_s = time.monotonic()
            print(
                f"\r\x1b[K{num_done:,} of {len(asked):,} answered",
                end="",
                file=sys.stderr,
                flush=True,
            )

    ended = asyncio.run(
        run_file(
            arguments.input_file,
            arguments.output_file,
            server=server,
            api_key=api_key,
            asked=asked,
            limits=limits,
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
    if ended.first_failure:
        print(f"the first that failed is {ended.first_failure}", file=sys.stderr)
    return 1 if ended.num_failed else 0
