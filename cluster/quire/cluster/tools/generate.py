"""``quire generate``: sends one prompt to a running server and prints the text as it arrives."""

import argparse
import sys
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from quire.cluster.cli.help import Parser, add_model_flag, add_server_flags, server_of
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    import grpc

    from quire.v1 import inference_pb2 as pb


def add_flags(parser: Parser) -> None:
    parser.description = (
        "Sends a prompt to a running server and prints the text as it arrives. "
        "Where the server wants an API key, it is read from QUIRE_API_KEY."
    )
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    add_server_flags(parser)
    add_model_flag(parser)
    parser.add_argument("--system", help="a system message; the prompt is then a chat turn")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat turn")
    parser.add_argument("--max-tokens", type=int, default=128, help="most tokens of the text")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens up to this sum"
    )
    parser.add_argument("--seed", type=int, help="seed that repeats a text")
    parser.set_defaults(run=_run)


def chat_request(
    messages: Sequence[tuple[str, str]], *, sampling: "pb.SamplingParams"
) -> "pb.GenerateRequest":
    """The request for a chat of ``(role, content)`` messages."""
    from quire.v1 import inference_pb2 as pb

    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.Chat(messages=turns), sampling=sampling)


def generate(
    channel: "grpc.Channel",
    request: "pb.GenerateRequest",
    *,
    metadata: tuple[tuple[str, str], ...] = (),
) -> "Generator[pb.GenerateResponse, None, None]":
    """Yields the chunks of one request as they arrive. Closing the generator cancels the request.

    Raises:
        grpc.RpcError: The server refused the request or is gone; `code` and `details` say why.
    """
    from quire.v1.inference_pb2_grpc import InferenceStub

    call = InferenceStub(channel).Generate(request, metadata=metadata)
    try:
        yield from call
    finally:
        call.cancel()


def _run(arguments: argparse.Namespace) -> int:
    import grpc

    from quire.cluster.cli.server import print_rpc_error

    request = _request(arguments)
    server = server_of(arguments)
    with server.channel() as channel:
        try:
            for chunk in generate(channel, request, metadata=server.metadata()):
                print(chunk.text, end="", flush=True)
        except grpc.RpcError as error:
            print_rpc_error(server, error)
            return 1
    print()
    return 0


def _request(arguments: argparse.Namespace) -> "pb.GenerateRequest":
    """Raises InvalidRequest: a sampling parameter is out of its range, or a text is not UTF-8."""
    from quire.cluster.wire import params_to_proto
    from quire.v1 import inference_pb2 as pb

    prompt = _text("prompt", _piped() if arguments.prompt == "-" else arguments.prompt)
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    sampling = params_to_proto(params)
    if arguments.chat or arguments.system is not None:
        given = arguments.system
        turns = [("system", _text("system", given))] if given is not None else []
        request = chat_request([*turns, ("user", prompt)], sampling=sampling)
    else:
        request = pb.GenerateRequest(text=prompt, sampling=sampling)
    request.model = arguments.model
    return request


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
