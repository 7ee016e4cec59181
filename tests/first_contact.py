"""A new user's first steps with the installed package: generates offline, serves the demo model,
chats over HTTP and gRPC, and stops the server. Prints how long each step took, and the longest
silence of the server's start. `tests/on_python` runs it; it needs no pytest.
"""

import json
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import grpc
import torch

from quire import LLM, SamplingParams, __version__, demo_model
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

QUESTION = demo_model.QUESTIONS[0]
MAX_TOKENS = 16
KV_BYTES = 32 * 2**20


def main() -> None:
    print(f"quire {__version__}, Python {platform.python_version()}, torch {torch.__version__}")
    clock = Stopwatch()
    offline = generate_offline()
    clock.say("offline", repr(offline))
    # The `quire` program that `pip install` put beside this interpreter.
    quire = Path(sys.executable).with_name("quire")
    free = ["--http-port", "0", "--grpc-port", "0", "--kv-cache-memory-bytes", str(KV_BYTES)]
    with subprocess.Popen([quire, "serve", *free], stdout=subprocess.PIPE, text=True) as server:
        try:
            grpc_address, http_address, silence_s = addresses(server)
            clock.say("serve", f"said nothing for {silence_s:.1f} s at most")
            answers = {}
            for door, chat in (("HTTP", chat_over_http), ("gRPC", chat_over_grpc)):
                answers[door] = chat(http_address if door == "HTTP" else grpc_address)
                clock.say(door, repr(answers[door]))
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
    clock.say("stop", f"status {server.returncode}")
    for door, answer in answers.items():
        assert answer == offline, f"{door} and offline have different answers"
    assert server.returncode == 0, f"quire serve ended with status {server.returncode}"


class Stopwatch:
    """Prints how long each step took since the one before."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def say(self, step: str, found: str) -> None:
        now_s = time.monotonic()
        print(f"{step:8} {now_s - self._since_s:5.1f} s  {found}", flush=True)
        self._since_s = now_s


def generate_offline() -> str:
    with LLM(str(demo_model.PATH), kv_cache_memory_bytes=KV_BYTES) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        (output,) = llm.chat([[{"role": "user", "content": QUESTION}]], params)
    return output.outputs[0].text


def addresses(server: subprocess.Popen[str]) -> tuple[str, str, float]:
    """The gRPC and HTTP addresses, which the server prints when it is ready, and its longest pause
    between two lines, in seconds."""
    assert server.stdout is not None
    printed, said_s, silence_s = "", time.monotonic(), 0.0
    while not (found := re.search(r"gRPC\s+(\S+).*(http://[^/\s]+)/", printed, re.DOTALL)):
        line = server.stdout.readline()
        assert line, f"quire serve ended; it printed {printed!r}"
        printed += line
        silence_s = max(silence_s, time.monotonic() - said_s)
        said_s = time.monotonic()
    return found[1], found[2], silence_s


def chat_over_http(address: str) -> str:
    body = {
        "model": demo_model.NAME,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def chat_over_grpc(address: str) -> str:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=QUESTION)]),
        sampling=pb.SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
    )
    with grpc.insecure_channel(address) as channel:
        return "".join(chunk.text for chunk in InferenceStub(channel).Generate(request))


if __name__ == "__main__":
    main()
