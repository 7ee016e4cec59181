"""The package `quire_client` against a gateway."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from quire.cluster.edge.access import Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.edge.grpc_server import build_grpc_server
from quire.cluster.features.installed import INSTALLED
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.v1 import inference_pb2 as pb
from quire_client import (
    AsyncClient,
    Chat,
    Client,
    InvalidArgument,
    NotFound,
    Overloaded,
    SamplingParams,
    Unauthenticated,
    Unavailable,
)
from quire_client.inputs import _CONSTRAINTS, generate_request
from quire_client.outputs import completions_of

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
PROMPT = list(range(20, 41))
PARAMS = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)


async def test_what_it_generates_is_what_the_model_says(start_cluster: Any) -> None:
    async with start_cluster() as cluster, AsyncClient(cluster.grpc_address) as client:
        expected = cluster.model.continuation(PROMPT, seed=5, max_tokens=12)
        chunks = [chunk async for chunk in client.stream(PROMPT, PARAMS, request_id="mine")]
        (completion,) = completions_of(chunks)
        assert completion.text == cluster.model.tokenizer.decode(expected)
        recent = cluster.table.recent(1, tenant=None)
    assert list(completion.token_ids) == expected
    assert [chunk.token_offset for chunk in chunks] == [
        sum(len(each.token_ids) for each in chunks[:number]) for number in range(len(chunks))
    ]
    assert completion.finish_reason == "length"
    assert completion.start.seed == 5
    assert completion.start.model == "hash"
    assert completion.start.num_prompt_tokens == len(PROMPT)
    assert completion.usage.num_output_tokens == 12
    assert recent[0].client_id == "mine"


async def test_the_client_of_threads_does_the_same(start_cluster: Any) -> None:
    def ask(address: str) -> tuple[list[int], list[int], str, str]:
        with Client(address) as client:
            (completion,) = client.generate("the cat", PARAMS, timeout_s=60)
            token_ids = client.tokenize("the cat")
            streamed = "".join(chunk.text for chunk in client.stream("the cat", PARAMS))
            assert streamed == completion.text
            return (
                list(completion.token_ids),
                token_ids,
                completion.text,
                client.detokenize(token_ids),
            )

    async with start_cluster(num_groups=1) as cluster:
        tokens, prompt, text, back = await asyncio.to_thread(ask, cluster.grpc_address)
    assert prompt == cluster.model.tokenizer.encode("the cat")
    assert tokens == cluster.model.continuation(prompt, seed=5, max_tokens=12)
    assert text == cluster.model.tokenizer.decode(tokens)
    assert back == "the cat"


async def test_completions_scores_and_chats(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster, AsyncClient(cluster.grpc_address) as client:
        tool = {"type": "function", "function": {"name": "sit", "parameters": {"type": "object"}}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "sat?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": "sit"}]},
        ]
        chat = Chat(messages, tools=[tool])
        prompt = await client.tokenize(chat)
        text = await client.detokenize(prompt)
        both = await client.generate(
            chat, SamplingParams(n=2, seed=3, max_tokens=4, logprobs=2, stop="\x00")
        )
        scores = await client.score(PROMPT, num_top=2)
    assert '"name": "sit"' in text
    assert '"function": "sit"' in text
    assert text.endswith("<|assistant|>")
    assert [completion.index for completion in both] == [0, 1]
    assert both[0].start.num_prompt_tokens == len(prompt)
    assert len(both[0].logprobs) == len(both[0].token_ids)
    assert [score.rank for score in both[0].logprobs] == [1] * len(both[0].token_ids)
    assert len(both[0].logprobs[0].top) == 2
    assert [score.token_id for score in scores] == PROMPT[1:]


async def test_refusals_are_exceptions_of_their_kind(start_cluster: Any) -> None:
    keys = ApiKeys({"good": Caller(tenant="a")})
    async with (
        start_cluster(num_groups=1, keys=keys) as cluster,
        AsyncClient(cluster.grpc_address) as stranger,
        AsyncClient(cluster.grpc_address, api_key="good") as client,
    ):
        with pytest.raises(Unauthenticated):
            await stranger.tokenize("x")
        with pytest.raises(NotFound):
            await client.generate("x", model="other")
        with pytest.raises(InvalidArgument, match="top_p"):
            await client.generate("x", SamplingParams(top_p=7))
        with pytest.raises(InvalidArgument, match="max_tokens=-1"):
            await client.generate("x", SamplingParams(max_tokens=-1))
        assert (await client.generate("x", PARAMS))[0].usage.num_output_tokens == 12
    with pytest.raises(InvalidArgument, match="api_key"):
        Client("127.0.0.1:1", api_key="a\nb")
    async with AsyncClient(cluster.grpc_address) as client:
        with pytest.raises(Unavailable) as raised:
            await client.generate("x")
    assert raised.value.code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_an_overloaded_server_says_when_to_try_again(start_cluster: Any) -> None:
    strict = {"admission": AdmissionConfig(max_queue_wait_s=0.0)}
    async with (
        start_cluster(num_groups=1, max_num_seqs=1, config=strict) as cluster,
        AsyncClient(cluster.grpc_address) as client,
    ):
        cluster.take_steps_of(0.05)
        async with contextlib.aclosing(
            client.stream(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
        ) as running:
            await anext(running)
            waiting = [asyncio.create_task(client.generate(PROMPT, PARAMS)) for _ in range(4)]
            done = await asyncio.gather(*waiting, return_exceptions=True)
        cluster.take_steps_of(0)
        await cluster.groups["g0"].settle()  # Closed streams are not computed further.
    refused = [each for each in done if isinstance(each, Overloaded)]
    assert refused
    assert all(each.retry_after_s and each.retry_after_s >= 1 for each in refused)


async def test_a_server_with_tls_is_trusted_by_its_authority(start_cluster: Any) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    pair = (
        certificate.private_key_pem.bytes(),
        b"".join(blob.bytes() for blob in certificate.cert_chain_pems),
    )
    async with start_cluster(num_groups=1) as cluster:
        server = build_grpc_server(cluster.models, features=INSTALLED)
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await server.start()
        root = authority.cert_pem.bytes()
        async with AsyncClient(f"localhost:{port}", root_certificates=root) as client:
            assert await client.detokenize(await client.tokenize("the cat")) == "the cat"
        async with AsyncClient(f"localhost:{port}", tls=True) as client:
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await client.tokenize("the cat")
        await server.stop(None)


def test_every_parameter_of_the_service_is_there() -> None:
    names = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    fields = set(SamplingParams.__dataclass_fields__)
    assert fields - set(_CONSTRAINTS) == names - {"structured_outputs"}
    assert set(_CONSTRAINTS) == {field.name for field in pb.Constraint.DESCRIPTOR.fields}


def test_what_it_sends_is_what_the_cluster_reads() -> None:
    params = SamplingParams(
        temperature=0.5,
        stop=["a", "b"],
        logit_bias={3: -1.0},
        allowed_token_ids=[3, 4],
        bad_words_token_ids=[[1, 2], [3]],
        json_schema={"type": "object"},
        truncate_prompt_tokens=-1,
    )
    sent = generate_request([1, 2], params, model="m", cache_salt="s", priority=-2)
    found = pb.GenerateRequest.FromString(sent.SerializeToString())
    assert found == pb.GenerateRequest(
        model="m",
        cache_salt="s",
        priority=-2,
        token_ids=pb.TokenIds(ids=[1, 2]),
        sampling=pb.SamplingParams(
            temperature=0.5,
            stop=["a", "b"],
            logit_bias={3: -1.0},
            allowed_token_ids=[3, 4],
            bad_words_token_ids=[pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[3])],
            structured_outputs=pb.Constraint(json_schema='{"type": "object"}'),
            truncate_prompt_tokens=-1,
        ),
    )


@pytest.mark.parametrize(
    ("prompt", "params", "what"),
    [
        ([-1], {}, "prompt=.-1.: "),
        ("\ud800", {}, "UTF-8"),
        ("x", {"regex": "a", "grammar": "b"}, "only one"),
        ("x", {"logit_bias": {"a": 1.0}}, "logit_bias"),
        ("x", {"stop": [3]}, "stop"),
        ("x", {"seed": 2**64}, "seed"),
        ("x", {"json_schema": {"a": object()}}, "json_schema"),
    ],
)
def test_what_cannot_be_sent_is_named(prompt: Any, params: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        generate_request(prompt, SamplingParams(**params), model="", cache_salt="", priority=0)


PROGRAM = """
import asyncio, importlib.util, sys
from quire_client import AsyncClient, Client, QuireError, SamplingParams

for name in ("quire", "ray", "torch", "numpy", "grpc_health"):
    assert importlib.util.find_spec(name) is None, name
params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
with Client(sys.argv[1]) as client:
    (completion,) = client.generate(list(range(20, 41)), params, timeout_s=60)
    try:
        client.generate("x", model="other")
    except QuireError as error:
        assert error.code.name == "NOT_FOUND"

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        return [chunk async for chunk in client.stream(list(range(20, 41)), params)]

assert "".join(chunk.text for chunk in asyncio.run(main())) == completion.text
print(*completion.token_ids)
"""


@pytest.mark.slow
async def test_its_wheel_needs_grpcio_and_protobuf_alone(
    start_cluster: Any, tmp_path: Path
) -> None:
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run(
        [*pip, "install", *offline, "--target", tmp_path, ROOT / "client"],
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "quire_client" / "py.typed").exists()
    (metadata,) = tmp_path.glob("quire_client-*/METADATA")
    lines = metadata.read_text().splitlines()
    needed = [line.split()[1].split(">")[0] for line in lines if line.startswith("Requires-Dist")]
    assert sorted(needed) == ["grpcio", "protobuf"]
    for name, path in installed():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(path)
    variables = {**os.environ, "PYTHONPATH": str(tmp_path)}
    async with start_cluster(num_groups=1) as cluster:
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", PROGRAM, cluster.grpc_address),
            stdout=subprocess.PIPE,
            env=variables,
            cwd=tmp_path,
        )
        output, _ = await run.communicate()
    assert run.returncode == 0
    expected = cluster.model.continuation(PROMPT, seed=5, max_tokens=12)
    assert list(map(int, output.split())) == expected


def installed() -> Iterator[tuple[str, Path]]:
    """Files of grpcio and protobuf as installed here, and of grpcio's dependencies."""
    for name in ("grpc", "google.protobuf", "google._upb", "typing_extensions"):
        spec = find_spec(name)
        assert spec is not None
        folders = spec.submodule_search_locations
        path = Path(folders[0] if folders else str(spec.origin))
        yield str(Path(*name.split("."))) + path.suffix, path
