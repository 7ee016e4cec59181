"""``quire chat``: a conversation with a running server, in the terminal."""

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from quire.cluster.cli.help import (
    Parser,
    add_model_flag,
    add_server_flags,
    server_of,
)
from quire.cluster.tools.generate import chat_request, generate

if TYPE_CHECKING:
    import grpc

    from quire.cluster.cli.server import Server
    from quire.v1 import inference_pb2 as pb

_HELP = "/clear forgets the conversation, /stats tells an answer's cost, /exit ends it"


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Talks to a running server: one line is one message, and Ctrl-C stops an "
        f"answer. {_HELP}. Where the server wants an API key, it is read from QUIRE_API_KEY."
    )
    add_server_flags(parser)
    add_model_flag(parser)
    parser.add_argument("--system", help="a system message")
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="most tokens of an answer; if absent, what the conversation leaves of the context",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 takes the likeliest token"
    )
    parser.add_argument("--seed", type=int, help="seed that repeats a conversation")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    import grpc

    from quire.cluster.cli.server import print_rpc_error
    from quire.cluster.wire import params_to_proto
    from quire.worker.request.sampling_params import SamplingParams

    sampling = params_to_proto(
        SamplingParams(
            max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed
        )
    )
    server = server_of(arguments)
    system = [("system", arguments.system)] if arguments.system is not None else []
    turns, stats = list(system), "nothing was asked yet"
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_HELP)
    with server.channel() as channel:
        while (line := _read(is_terminal)) is not None:
            if line == "/exit":
                break
            if line == "/help":
                print(_HELP)
            elif line == "/clear":
                turns = list(system)
            elif line == "/stats":
                print(stats)
            elif line:
                request = chat_request([*turns, ("user", line)], sampling=sampling)
                request.model = arguments.model
                try:
                    text, stats = _answer(channel, server, request)
                except grpc.RpcError as error:
                    print_rpc_error(server, error)
                    if not is_terminal:
                        return 1
                    continue
                turns += [("user", line), ("assistant", text)]
    return 0


def _read(is_terminal: bool) -> str | None:
    """The next line of input; ``None`` at its end."""
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        return None


def _answer(
    channel: "grpc.Channel", server: "Server", request: "pb.GenerateRequest"
) -> tuple[str, str]:
    """Prints an answer as it arrives; returns its text, even if cut off, and a line of usage
    figures."""
    text, stats = "", "the answer was stopped"
    with closing(generate(channel, request, metadata=server.metadata())) as chunks:
        try:
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
                text += chunk.text
                if chunk.HasField("usage"):
                    stats = _stats(chunk.usage)
        except KeyboardInterrupt:
            print(" …", end="")
    print()
    return text, stats


def _stats(usage: "pb.Usage") -> str:
    per_s = usage.num_output_tokens / max(usage.total_time_s, 1e-9)
    return (
        f"{usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} cached; "
        f"{usage.num_output_tokens} tokens, the first in {usage.time_to_first_token_s:.2f} s, "
        f"{per_s:.0f} a second"
    )
