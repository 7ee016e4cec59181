"""Embeddings, rerankings and scores over OpenAI's client, plain HTTP and gRPC."""

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from openai import AsyncOpenAI
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from tests.cluster.test_models import serving
from tests.golden.test_embeddings import (
    MINILM,
    expected,
    pair_logits,
    save,
    save_cross_encoder,
)

from quire import demo_model
from quire.cluster.config import ClusterConfig, ModelConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.features.embeddings.embed import Ask
from quire.cluster.group.server import GroupServer
from quire.llm import LLM
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Chat, Text, Tokens
from quire.worker.request.scoring import EmbeddingUse
from quire.worker.text.tokenizer import Tokenizer
from quire_client import AsyncClient, InvalidArgument

pytestmark = pytest.mark.anyio

TEXTS = ["A cat sits.", "The kitten rests on the mat.", "Stocks fell."]
MODELS = {"encoder": ("bert", "cls_token"), "decoder": ("qwen3", "lasttoken")}
YES, NO = 7, 8
TEMPLATE = """\
{%- for role in ("query", "document") -%}
<{{ role }}>{{ messages | selectattr("role", "eq", role) | map(attribute="content") | first }}
{%- endfor -%}
{%- if add_generation_prompt %}:{% endif -%}"""


class Served:
    """A gateway with a text model, two embedding models and a reranker, each with a group."""

    def __init__(
        self, server: GatewayServer, twins: dict[str, Any], paths: dict[str, Path]
    ) -> None:
        self.url = f"http://{server.http_address}"
        self.grpc_address = server.grpc_address
        self._twins = twins
        self._tokenizers = {name: Tokenizer.load(path) for name, path in paths.items()}

    def vectors(self, model: str, texts: list[str]) -> npt.NDArray[np.float32]:
        """transformers' embeddings of ``texts``."""
        ids = [self._tokenizers[model].encode(text) for text in texts]
        return np.stack([expected(self._twins[model], each, MODELS[model][1]) for each in ids])

    def score(self, query: str, document: str) -> float:
        """transformers' score from the reranker's logits."""
        ids = self._tokenizers["reranker"].encode(
            f"<query>{query}<document>{document}:", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = self._twins["reranker"](torch.tensor([ids])).logits[0, -1]
        return float(torch.sigmoid(logits[YES] - logits[NO]))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    paths, twins = {"text": demo_model.PATH}, {}
    for name, (case, _) in MODELS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        twins[name] = save(case, paths[name], vocab_size=_vocab_size())
        for file in demo_model.PATH.glob("*token*"):
            shutil.copy(file, paths[name])
    paths["reranker"] = tmp_path_factory.mktemp("reranker")
    twins["reranker"] = save_reranker(paths["reranker"])
    settings: list[dict[str, Any]] = [
        {
            "engine": EngineConfig(model=path, num_blocks=64, num_threads=1),
            "served_model_name": name,
        }
        for name, path in paths.items()
    ]
    first, *others = settings
    config = ClusterConfig(
        **first,
        more_models=tuple(ModelConfig(**each) for each in others),
        grpc_port=0,
        http_port=0,
        group_wait_s=0,
    )
    async with serving(config, *paths) as server:
        yield Served(server, twins, {name: paths[name] for name in twins})


def save_reranker(folder: Path) -> Any:
    """Saves a random model in the form in which sentence-transformers saves Qwen3-Reranker."""
    twin = save("qwen3", folder, vocab_size=_vocab_size())
    for file in demo_model.PATH.glob("*token*"):
        shutil.copy(file, folder)
    modules = [{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]
    modules.append(
        {
            "path": "1_LogitScore",
            "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
        }
    )
    (folder / "modules.json").write_text(json.dumps(modules))
    kind = {"model_type": "CrossEncoder"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(kind))
    (folder / "1_LogitScore").mkdir()
    config = {"true_token_id": YES, "false_token_id": NO}
    (folder / "1_LogitScore/config.json").write_text(json.dumps(config))
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    settings = {
        "transformer_task": "text-generation",
        "modality_config": {"message": message},
        "module_output_name": "causal_logits",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return twin


def _vocab_size() -> int:
    config = json.loads((demo_model.PATH / "config.json").read_text())
    size: int = config["vocab_size"]
    return size


@pytest.fixture
async def client(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served.url, timeout=None) as client:
        yield client


async def test_the_list_of_models_tells_what_each_is_for(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert {each["id"]: each["task"] for each in listed} == {
        "text": "generate",
        "encoder": "embed",
        "decoder": "embed",
        "reranker": "score",
    }


@pytest.mark.parametrize("model", MODELS)
async def test_embeddings_are_those_of_transformers(served: Served, model: str) -> None:
    vectors = served.vectors(model, TEXTS)
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        made = await client.embeddings.create(model=model, input=TEXTS)  # In base64.
        one = await client.embeddings.create(model=model, input=TEXTS[1], encoding_format="float")
        short = await client.embeddings.create(model=model, input=TEXTS[1], dimensions=8)
        with pytest.raises(openai.BadRequestError, match="the model's embeddings have 64"):
            await client.embeddings.create(model=model, input=TEXTS[1], dimensions=65)
    assert [each.index for each in made.data] == [0, 1, 2]
    found = np.array([each.embedding for each in made.data], np.float32)
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    np.testing.assert_array_equal(np.array(one.data[0].embedding, np.float32), found[1])
    first = found[1, :8] / np.linalg.norm(found[1, :8])
    np.testing.assert_allclose(short.data[0].embedding, first, atol=1e-6)
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0
    from langchain_openai import OpenAIEmbeddings  # Slow to import.

    async with httpx.AsyncClient() as http:
        by_langchain = OpenAIEmbeddings(
            model=model,
            base_url=f"{served.url}/v1",
            api_key="none",  # type: ignore[arg-type]
            check_embedding_ctx_length=False,  # Otherwise it would send ids of OpenAI's tokenizer.
            http_async_client=http,
        )
        listed = await by_langchain.aembed_documents(TEXTS)
    np.testing.assert_array_equal(np.array(listed, np.float32), found)


@pytest.mark.parametrize("model", MODELS)
async def test_grpc_makes_the_same(served: Served, client: httpx.AsyncClient, model: str) -> None:
    over_http = await client.post("/v1/embeddings", json={"model": model, "input": TEXTS})
    ranked = await client.post(
        "/v1/rerank", json={"model": model, "query": TEXTS[0], "documents": TEXTS[1:]}
    )
    async with grpc.aio.insecure_channel(served.grpc_address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        inputs = [pb.EmbedInput(text=text) for text in TEXTS]
        made = await stub.Embed(pb.EmbedRequest(model=model, inputs=inputs))
        asked = pb.RankRequest(model=model, query=TEXTS[0], documents=TEXTS[1:])
        order = await stub.Rank(asked)
        with pytest.raises(grpc.aio.AioRpcError, match="input 1: input is empty") as raised:
            await stub.Embed(
                pb.EmbedRequest(model=model, inputs=[inputs[0], pb.EmbedInput(text="")])
            )
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    for one, other in zip(over_http.json()["data"], made.embeddings, strict=True):
        np.testing.assert_array_equal(np.array(one["embedding"], np.float32), list(other.values))
    scores = [(each["index"], each["relevance_score"]) for each in ranked.json()["results"]]
    np.testing.assert_allclose([(each.index, each.score) for each in order.ranked], scores)


@pytest.mark.slow
async def test_requests_of_a_group_that_dies_get_the_same_elsewhere(tmp_path: Path) -> None:
    save("bert", tmp_path, vocab_size=_vocab_size())
    for file in demo_model.PATH.glob("*token*"):
        shutil.copy(file, tmp_path)
    engine = EngineConfig(model=tmp_path, num_blocks=64, num_threads=1)
    config = ClusterConfig(engine=engine, served_model_name="m", grpc_port=0, http_port=0)
    async with contextlib.AsyncExitStack() as stack:
        server = await GatewayServer.start(config)
        stack.push_async_callback(server.stop, drain_timeout_s=0)
        started = [await GroupServer.start(config, group_id=name) for name in "ab"]
        stack.push_async_callback(started[1].stop, drain_timeout_s=0)
        server.set_groups([each.contact for each in started], model="m")
        groups = server.models.named("m").groups
        while groups.num_ready < len(started):
            await groups.wait_for_change(timeout_s=1)
        url = f"http://{server.http_address}/v1/embeddings"
        async with httpx.AsyncClient(timeout=None) as client:

            async def ask(number: int) -> Any:
                answer = await client.post(url, json={"input": [[number + 3] * 40] * 8})
                assert answer.status_code == 200, answer.text
                return answer.json()["data"]

            before = [await ask(number) for number in range(4)]
            under_way = [asyncio.create_task(ask(number % 4)) for number in range(40)]
            await asyncio.sleep(0.02)
            await started[0].stop(drain_timeout_s=0)
            for number, each in enumerate(await asyncio.gather(*under_way)):
                assert each == before[number % 4]

        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            vllm: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            request = vllm_engine_pb2.EmbedRequest(request_id="r")
            request.tokenized.input_ids.extend([3] * 40)
            made = await vllm.Embed(request)
    np.testing.assert_array_equal(made.embedding, np.array(before[0][0]["embedding"], np.float32))
    assert (made.embedding_dim, made.prompt_tokens) == (64, 40)


async def test_token_ids_texts_and_cut_texts(served: Served, client: httpx.AsyncClient) -> None:
    ids = [5, 6, 7, 8]
    answers = []
    for given in (ids, [ids], [ids, [9]]):
        answer = await client.post("/v1/embeddings", json={"model": "encoder", "input": given})
        answers.append(answer.json()["data"][0]["embedding"])
    assert answers[0] == answers[1] == answers[2]
    long = {"model": "encoder", "input": [7] * 161}
    refused = await client.post("/v1/embeddings", json=long)
    assert refused.status_code == 400
    assert "input has 161 tokens and max_model_len is 160" in refused.json()["error"]["message"]
    whole = await client.post("/v1/embeddings", json=long | {"input": [7] * 160})
    for cut in ({"truncate_prompt_tokens": -1}, {"truncate": "END"}):
        answer = await client.post("/v1/embeddings", json=long | cut)
        assert answer.json()["data"] == whole.json()["data"]
    refused = await client.post("/v1/embeddings", json=long | {"truncate": "START"})
    assert refused.json()["error"]["param"] == "truncate"
    assert "'NONE' or 'END'" in refused.json()["error"]["message"]


async def test_documents_are_ranked_by_cosine(served: Served, client: httpx.AsyncClient) -> None:
    query, *documents = served.vectors("decoder", TEXTS)
    cosines = [float(query @ each) for each in documents]
    body = {"model": "decoder", "query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}]}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = (await client.post(path, json=body)).json()
        order = [each["index"] for each in answer["results"]]
        assert order == np.argsort(-np.array(cosines)).tolist()
        for each in answer["results"]:
            assert each["relevance_score"] == pytest.approx(cosines[each["index"]], abs=1e-5)
            assert each["document"] == {"text": TEXTS[1 + each["index"]]}
    (only,) = (
        await client.post("/v1/rerank", json=body | {"top_n": 1, "return_documents": False})
    ).json()["results"]
    assert only == {key: answer["results"][0][key] for key in ("index", "relevance_score")}
    long = body | {"documents": ["word " * 500]}
    assert (await client.post("/v1/rerank", json=long)).status_code == 400
    for most in (8, 4096):
        cut = await client.post("/v1/rerank", json=long | {"max_tokens_per_doc": most})
        assert cut.status_code == 200
    scored = await client.post(
        "/v1/score", json={"model": "decoder", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
    )
    found = [each["score"] for each in scored.json()["data"]]
    np.testing.assert_allclose(found, cosines, atol=1e-5)


async def test_documents_are_cut_and_the_query_is_not(
    served: Served, client: httpx.AsyncClient
) -> None:
    """The same documents as token ids, cut by hand, give the same cosines."""
    tokenizer = Tokenizer.load(demo_model.PATH)
    query, documents, kept = "which animal rests on a mat? " * 4, TEXTS, 3
    cut = [tokenizer.encode(each) for each in documents]
    assert all(len(each) > kept for each in cut)
    for model in MODELS:
        inputs = {"model": model, "input": [tokenizer.encode(query), *(e[:kept] for e in cut)]}
        made = (await client.post("/v1/embeddings", json=inputs)).json()["data"]
        first, *others = (np.array(each["embedding"], np.float64) for each in made)
        body = {"model": model, "query": query, "documents": documents, "max_tokens_per_doc": kept}
        answer = (await client.post("/v1/rerank", json=body)).json()
        for each in answer["results"]:
            other = others[each["index"]]
            cosine = float(first @ other / np.linalg.norm(first) / np.linalg.norm(other))
            assert each["relevance_score"] == pytest.approx(cosine, abs=1e-6)


async def test_a_document_comes_back_as_it_was_sent(client: httpx.AsyncClient) -> None:
    documents = ["a", {"text": "b", "id": 7, "more": {"x": [1]}}]
    body = {"model": "encoder", "query": "x", "documents": documents}
    results = (await client.post("/v1/rerank", json=body)).json()["results"]
    found = {each["index"]: each["document"] for each in results}
    assert found == {0: {"text": "a"}, 1: documents[1]}


@pytest.mark.parametrize("model", ["encoder", "reranker", "text"])
@pytest.mark.parametrize("texts", [([], []), (["x"], []), ([], ["x"]), ("x", [])])
async def test_empty_lists_are_refused(
    model: str, texts: tuple[Any, Any], client: httpx.AsyncClient
) -> None:
    body = {"model": model, "text_1": texts[0], "text_2": texts[1]}
    answer = await client.post("/v1/score", json=body)
    assert answer.status_code == 400, answer.text
    assert re.search("text_. is empty|text_1 has 0 texts", answer.json()["error"]["message"])


async def test_a_refusal_names_the_clients_own_place(client: httpx.AsyncClient) -> None:
    for model in ("encoder", "decoder"):
        for path, body, message in (
            ("rerank", {"query": "x", "documents": ["y", ""]}, "document 1: input is empty"),
            ("rerank", {"query": "", "documents": ["y"]}, "query: input is empty"),
            ("score", {"text_1": "q", "text_2": ["a", "a", ""]}, "pair 2: text_2: input is empty"),
            ("rerank", {"query": "x", "documents": ["y"] * 2049}, "documents has 2049 items"),
        ):
            answer = await client.post(f"/v1/{path}", json={"model": model, **body})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.slow
async def test_as_many_inputs_as_openai_takes_are_embedded(client: httpx.AsyncClient) -> None:
    body = {"model": "encoder", "input": [[5]] * 2048}
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == 2048


async def test_a_reranker_scores_pairs_behind_a_cached_query(
    served: Served, client: httpx.AsyncClient
) -> None:
    query, documents = "which animal rests on a mat? " * 4, [f"document {n}" for n in range(20)]
    expected_scores = [served.score(query, each) for each in documents]
    body = {"model": "reranker", "query": query, "documents": documents}
    answer = (await client.post("/v1/rerank", json=body)).json()
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([found[n] for n in range(20)], expected_scores, atol=1e-5)
    order = [each["index"] for each in answer["results"]]
    assert order == sorted(range(20), key=lambda n: -found[n])
    again = (await client.post("/v1/rerank", json=body | {"documents": documents[:2]})).json()
    assert {each["index"]: each["relevance_score"] for each in again["results"]} == {
        n: found[n] for n in range(2)
    }
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2
    pairs = {"model": "reranker", "text_1": query, "text_2": documents[:3]}
    scored = (await client.post("/v1/score", json=pairs)).json()["data"]
    assert [each["score"] for each in scored] == [found[n] for n in range(3)]
    async with AsyncClient(served.grpc_address) as ours:
        ranked = await ours.rank(query, documents, model="reranker", top_n=2)
    assert [each.index for each in ranked] == order[:2]
    for cut in ({"truncate_prompt_tokens": 9}, {"max_tokens_per_doc": 1}):
        refused = await client.post("/v1/rerank", json=body | cut)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("document 0")
    for harmless in (
        {"truncate_prompt_tokens": 150},
        {"truncate": "END"},
        {"max_tokens_per_doc": 90},
    ):
        whole = (await client.post("/v1/rerank", json=body | harmless)).json()
        assert whole["results"] == answer["results"]
    made = await client.post("/v1/embeddings", json={"model": "reranker", "input": "x"})
    assert "makes no embeddings" in made.json()["error"]["message"]


def test_the_offline_api_renders_pairs_and_texts(tmp_path: Path) -> None:
    twin = save_reranker(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    pairs = [("a cat", "it rests"), ("a cat", "stocks")]
    empties: list[tuple[list[str], list[str]]] = [([], ["x"]), (["x"], []), ([], [])]
    with LLM(tmp_path, device="cpu", num_blocks=64, num_threads=1) as llm:
        found = llm.score("a cat", [each for _, each in pairs], use_tqdm=False)
        same = llm.score(*pairs[0], truncate_prompt_tokens=-1, use_tqdm=False)
        assert same[0].outputs == found[0].outputs
        for first, second in empties:
            with pytest.raises(InvalidRequest, match="give one, or as many"):
                llm.score(first, second, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="makes no embeddings: it generates text"):
            llm.embed("x", use_tqdm=False)
    for (query, document), output in zip(pairs, found, strict=True):
        text = f"<query>{query}<document>{document}:"
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert output.prompt_token_ids == ids
        with torch.inference_mode():
            logits = twin(torch.tensor([ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logits[7] - logits[8])))

    save_as_embedding_model(tmp_path)
    with LLM(tmp_path, device="cpu", num_blocks=64, num_threads=1) as llm:
        (made,) = llm.embed("a cat", truncate_prompt_tokens=-1, use_tqdm=False)
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens=3 cannot cut it"):
            llm.embed("a cat", truncate_prompt_tokens=3, use_tqdm=False)
    assert made.prompt_token_ids == tokenizer.encode("<user>a cat", add_special_tokens=False)
    vector = expected(twin, made.prompt_token_ids, "lasttoken")
    np.testing.assert_allclose(made.outputs.embedding, vector, atol=1e-5)


def save_as_embedding_model(folder: Path) -> None:
    """Makes a reranker's folder one of embeddings whose texts a chat template renders."""
    (folder / "chat_template.jinja").write_text("<user>{{ messages[0].content }}")
    message = {"method": "forward", "method_output_name": "last_hidden_state", "format": "flat"}
    settings = {"modality_config": {"message": message}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    (folder / "config_sentence_transformers.json").write_text("{}")
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode": "lasttoken"}')
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [{"path": at, "type": f"sentence_transformers.models.{kind}"} for at, kind in modules]
    (folder / "modules.json").write_text(json.dumps(listed))


def test_a_gateway_renders_texts_if_the_folder_says_so() -> None:
    use = EmbeddingUse(is_chat=True, prompt="find")
    request = Ask(truncate_prompt_tokens=5).embedding((Text("x"), Tokens([1])), use)
    messages = [{"role": "system", "content": "find"}, {"role": "user", "content": "x"}]
    assert request.prompt == (Chat(messages, add_generation_prompt=False), Tokens([1]))
    assert request.sampling.truncate_prompt_tokens is None, "checked when it has been rendered"
    lower = Ask().embedding((Text("X"), Tokens([7])), EmbeddingUse(is_lower=True))
    assert lower.prompt == (Text("x"), Tokens([7]))
    plain = Ask(truncate_prompt_tokens=5).embedding((Text("x"),), EmbeddingUse())
    assert (plain.prompt, plain.sampling.truncate_prompt_tokens) == ((Text("x"),), 5)


async def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    model = save_cross_encoder("bert", tmp_path)
    query, documents = "w1 w2 w3", [f"w{n} w{n + 1}" for n in range(20)]
    logits = pair_logits(model, tmp_path, [(query, each) for each in documents])
    engine = EngineConfig(model=tmp_path, num_blocks=64, num_threads=1)
    config = ClusterConfig(engine=engine, served_model_name="m", grpc_port=0, http_port=0)
    async with (
        serving(config, "m") as server,
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=None) as client,
    ):
        body = {"query": query, "documents": documents}
        answer = (await client.post("/v1/rerank", json=body)).json()
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        scored = await client.post("/v1/score", json={"text_1": query, "text_2": documents})
        long = body | {"documents": ["w7 " * 500]}
        too_long = await client.post("/v1/rerank", json=long)
        cut = await client.post("/v1/rerank", json=long | {"truncate_prompt_tokens": -1})
        cut_in_parts = await client.post("/v1/rerank", json=long | {"max_tokens_per_doc": 2})
        refused = [
            await client.post("/v1/embeddings", json={"input": "w1"}),
            await client.post("/v1/rerank", json=body | {"query": "w1 [SEP]"}),
            await client.post("/v1/rerank", json=long | {"truncate_prompt_tokens": 3}),
            await client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 1}),
        ]
    expected_scores = torch.tensor(logits).sigmoid()
    np.testing.assert_allclose([found[n] for n in range(20)], expected_scores, atol=1e-5)
    assert [each["score"] for each in scored.json()["data"]] == [found[n] for n in range(20)]
    assert too_long.status_code == 400
    assert [each["relevance_score"] for each in cut_in_parts.json()["results"]] == pytest.approx(
        torch.tensor(pair_logits(model, tmp_path, [(query, "w7 w7")])).sigmoid().tolist(), abs=1e-5
    )
    whole = pair_logits(model, tmp_path, [(query, "w7 " * (160 - 6))])
    (only,) = cut.json()["results"]
    assert only["relevance_score"] == pytest.approx(float(torch.tensor(whole).sigmoid()), abs=1e-5)
    for answer_, message in zip(
        refused,
        ("use /v1/rerank or /v1/score", "model's separator", "model's separator", "no head"),
        strict=True,
    ):
        assert answer_.status_code == 400
        assert message in answer_.json()["error"]["message"]


async def test_the_commands_of_the_documents_answer(
    client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[4] / "docs/embeddings.md").read_text()
    calls = re.findall(r"curl -s http://127\.0\.0\.1:8000(\S+) .*-d '(.*)'", page)
    assert len(calls) == 3
    for path, body in calls:
        answer = await client.post(path, json=json.loads(body) | {"model": "encoder"})
        assert answer.status_code == 200, answer.text
    if MINILM.is_dir():
        (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        exec(program.replace("sentence-transformers/all-MiniLM-L6-v2", str(MINILM)), {})
        assert capsys.readouterr().out.count("\n") == 5


async def test_our_own_client_gets_the_same(served: Served, client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={"model": "encoder", "input": TEXTS})
    async with AsyncClient(served.grpc_address) as ours:
        made = await ours.embed([*TEXTS, [5, 6]], model="encoder")
        ranked = await ours.rank(TEXTS[0], TEXTS[1:], model="encoder", top_n=1)
        short = await ours.embed(TEXTS[:1], model="encoder", dimensions=8)
        with pytest.raises(InvalidArgument, match="input 1: input has 161 tokens"):
            await ours.embed(["x", [7] * 161], model="encoder")
    for each, one in zip(made, answer.json()["data"], strict=False):
        np.testing.assert_array_equal(each.values, np.array(one["embedding"], np.float32))
    assert made[3].num_prompt_tokens == 2
    assert len(short[0].values) == 8
    vectors = [np.array(each.values) for each in made]
    assert ranked[0].index == np.argmax([vectors[0] @ each for each in vectors[1:3]])


async def test_what_a_model_does_not_do_is_refused(client: httpx.AsyncClient) -> None:
    for path, body, message in (
        ("/v1/embeddings", {"model": "text", "input": "x"}, "makes no embeddings"),
        ("/v1/completions", {"model": "encoder", "prompt": "x"}, "no head to generate text with"),
        ("/v1/embeddings", {"model": "encoder", "input": []}, "input is empty"),
        ("/v1/embeddings", {"model": "encoder", "input": ""}, "input is empty"),
        ("/v1/embeddings", {"model": "encoder", "input": ["x", ""]}, "input 1: input is empty"),
        ("/v1/embeddings", {"model": "encoder", "input": ["x"] * 2049}, "at most 2048"),
        ("/v1/rerank", {"model": "encoder", "query": "x", "documents": []}, "documents is empty"),
        (
            "/v1/score",
            {"model": "encoder", "text_1": ["x", "y"], "text_2": ["x"] * 3},
            "text_1 has 2 texts and text_2 3",
        ),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 400, (path, body)
        assert message in answer.json()["error"]["message"]
