"""A first user's steps, on what is installed: generates offline, then serves the demo model, chats
over HTTP and gRPC and stops the server. `tests/on_python` runs it; it needs no pytest.
"""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc

from quire import demo_model
from quire.llm import LLM, SamplingParams
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

QUESTION = demo_model.QUESTIONS[0]
MAX_TOKENS = 16
KV_BYTES = 32 * 2**20


def main() -> None:
    offline = generate_offline()
    print(f"offline  {offline!r}", flush=True)
    # The program beside this interpreter: what `pip install` put there.
    quire = Path(sys.executable).with_name("quire")
    free = ["--http-port", "0", "--grpc-port", "0", "--kv-cache-memory-bytes", str(KV_BYTES)]
    with subprocess.Popen([quire, "serve", *free], stdout=subprocess.PIPE, text=True) as server:
        try:
            grpc_address, http_address = addresses(server)
            answers = {"HTTP": chat_over_http(http_address), "gRPC": chat_over_grpc(grpc_address)}
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
    for door, answer in answers.items():
        print(f"{door}     {answer!r}")
        assert answer == offline, f"{door} and offline have different answers"
    assert server.returncode == 0, f"quire serve ended with status {server.returncode}"
    print("stopped")


def generate_offline() -> str:
    with LLM(str(demo_model.PATH), kv_cache_memory_bytes=KV_BYTES) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
        (output,) = llm.chat([[{"role": "user", "content": QUESTION}]], params)
    return output.outputs[0].text


def addresses(server: subprocess.Popen[str]) -> tuple[str, str]:
    """Those of gRPC and HTTP, which the server prints when it is ready."""
    assert server.stdout is not None
    printed = ""
    while not (found := re.search(r"gRPC\s+(\S+).*(http://[^/\s]+)/", printed, re.DOTALL)):
        line = server.stdout.readline()
        assert line, f"quire serve ended; it printed {printed!r}"
        printed += line
    return found[1], found[2]


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
