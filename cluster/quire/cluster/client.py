"""A client of the gRPC service: what the demo and ``quire generate`` speak through."""

import sys
from collections.abc import Generator, Sequence

import grpc

from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub


def chat_request(
    messages: Sequence[tuple[str, str]], *, sampling: pb.SamplingParams
) -> pb.GenerateRequest:
    """A chat of ``(role, content)`` turns."""
    turns = [pb.ChatMessage(role=role, content=content) for role, content in messages]
    return pb.GenerateRequest(chat=pb.Chat(messages=turns), sampling=sampling)


def generate(
    channel: grpc.Channel, request: pb.GenerateRequest
) -> Generator[pb.GenerateResponse, None, None]:
    """The chunks of one request, as they come. Closing the generator cancels the request.

    Raises:
        grpc.RpcError: The server refused the request or is gone; `code` and `details` say why.
    """
    call = InferenceStub(channel).Generate(request)
    try:
        yield from call
    finally:
        call.cancel()


def generate_to_stdout(
    prompt: str,
    *,
    address: str,
    system: str | None,
    chat: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
) -> int:
    """Prints the text as it arrives; returns the process's exit status."""
    sampling = pb.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    if chat:
        turns = [("system", system)] if system is not None else []
        request = chat_request([*turns, ("user", prompt)], sampling=sampling)
    else:
        request = pb.GenerateRequest(text=prompt, sampling=sampling)
    with grpc.insecure_channel(address) as channel:
        try:
            for chunk in generate(channel, request):
                print(chunk.text, end="", flush=True)
        except grpc.RpcError as error:
            print(f"quire: {address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print()
    return 0
