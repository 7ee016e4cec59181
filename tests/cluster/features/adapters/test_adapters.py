"""LoRA adapters in a cluster of the hash model: names, failover, replacement, and the transfer of
files to groups."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import save_file

from quire.cluster.edge.access import EVERYONE, Caller
from quire.cluster.edge.auth import ApiKeys
from quire.cluster.features.adapters import catalog as serving_adapters
from quire.cluster.features.adapters.catalog import Adapters, Word
from quire.cluster.gateway.models import Models
from quire.router.prefix_index.directory import GroupId
from quire.v1 import admin_pb2, admin_pb2_grpc, group_pb2
from quire.v1 import inference_pb2 as pb
from quire.worker.parts.adapters.store import AdapterStore
from quire.worker.request.errors import AdapterError

pytestmark = pytest.mark.anyio

PROMPT = list(range(5, 25))
MANY = 60
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an adapter of one tensor. The hash model uses only its digest."""

    def write(name: str, *, seed: int, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        values = np.random.default_rng(seed).normal(size=(8, 16)).astype(np.float32)
        save_file({"x.lora_A.weight": values}, folder / "adapter_model.safetensors")
        fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, **config}
        (folder / "adapter_config.json").write_text(json.dumps(fields))
        return folder

    return write


class Keeper:
    """A gateway's adapter keeper without checks that need a real model."""

    def __init__(self, root: Path) -> None:
        self.store = AdapterStore(root)
        self.folder, self.hold = self.store.folder, self.store.hold

    def keep(self, source: str) -> str:
        return self.store.put(Path(source))


@pytest.fixture
def start(start_cluster: Any, tmp_path: Path) -> Callable[..., Any]:
    """A cluster on one node, or with a separate store for each of ``nodes``."""

    def start(*, nodes: int = 0, **options: Any) -> Any:
        keeper = Keeper(tmp_path / "store")
        stores = [AdapterStore(tmp_path / f"node{number}") for number in range(nodes)]
        return start_cluster(
            keeper=keeper,
            stores=stores or [keeper.store],
            enable_lora=True,
            **{"max_loras": 2, **options},
        )

    return start


def asked(model: str, *, max_tokens: int = 8, seed: int = 3) -> pb.GenerateRequest:
    request = pb.GenerateRequest(model=model)
    request.token_ids.ids.extend(PROMPT)
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = True
    request.sampling.seed = seed
    return request


async def tokens(cluster: Any, model: str, **options: Any) -> list[int]:
    answer: list[int] = []
    async for chunk in cluster.inference.Generate(asked(model, **options)):
        if chunk.HasField("start"):
            assert chunk.start.model == model
        answer += chunk.token_ids
    return answer


def said(cluster: Any, digest: str, *, max_tokens: int = 8, seed: int = 3) -> list[int]:
    """The expected tokens, from the model alone."""
    found: list[int] = cluster.model.continuation(
        PROMPT, seed=seed, max_tokens=max_tokens, adapter=digest
    )
    return found


def digest_of(cluster: Any, name: str) -> str:
    found: str = {each.name: each.digest for each in cluster.models.adapters}[name]
    return found


async def test_each_name_has_its_own_tokens_and_is_listed(start: Any, write: Write) -> None:
    async with start(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        for name, seed in (("red", 1), ("blue", 2)):
            await cluster.models.adapters.load(name, str(write(name, seed=seed)))
        digests = {name: digest_of(cluster, name) for name in ("red", "blue")}
        assert len(set(digests.values())) == 2
        names = {"hash": "", **digests}
        answers = await asyncio.gather(*(tokens(cluster, name) for name in names))
        assert answers == [said(cluster, digest) for digest in names.values()]
        assert len({tuple(answer) for answer in answers}) == 3

        completion = await cluster.openai.completions.create(
            model="red", prompt=PROMPT, max_tokens=8, seed=3, extra_body={"return_token_ids": True}
        )
        assert completion.model == "red"
        whole = said(cluster, digests["red"])
        assert completion.choices[0].token_ids == whole[: len(completion.choices[0].token_ids)]
        base = await cluster.openai.completions.create(model="hash", prompt="x", max_tokens=1)
        assert base.system_fingerprint != completion.system_fingerprint
        listed = {each.id: each for each in (await cluster.openai.models.list()).data}
        assert listed.keys() == set(names)
        assert (listed["red"].parent, listed["blue"].parent) == ("hash", "hash")
        assert listed["red"].root.endswith("/red")
        assert (await cluster.openai.models.retrieve("blue")).parent == "hash"
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 4}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ):
            answer = await client.post(f"{cluster.http_url}{path}", json={"model": "red", **body})
            assert answer.json()["model"] == "red", answer.text
        unknown = await client.post(
            f"{cluster.http_url}/v1/completions", json={"model": "green", "prompt": "x"}
        )
        assert unknown.status_code == 404
        assert "'hash', 'blue', 'red' are served" in unknown.json()["error"]["message"]
        page = (await client.get(f"{cluster.http_url}/metrics")).text
    found = {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    labels = {"group": "g0", "model": "hash"}
    assert found["quire_group_loaded_adapters"] == (2, labels)
    assert found["quire_group_adapter_loads_total"] == (2, labels)


async def test_streams_of_adapters_survive_a_group(start: Any, write: Write) -> None:
    """Groups on separate nodes: the other group receives the adapters' files."""
    async with start(num_groups=2, nodes=2, max_num_seqs=4) as cluster:
        for name, seed in (("red", 1), ("blue", 2)):
            await cluster.models.adapters.load(name, str(write(name, seed=seed)))
        names = {"hash": "", "red": digest_of(cluster, "red"), "blue": digest_of(cluster, "blue")}
        cluster.take_steps_of(0.005)
        runs = [
            (name, seed, asyncio.ensure_future(tokens(cluster, name, max_tokens=MANY, seed=seed)))
            for seed in range(4)
            for name in names
        ]
        while not all(
            group.engine_loop.stats.num_output_tokens for group in cluster.groups.values()
        ):
            await asyncio.sleep(0.01)
        await cluster.groups["g0"].kill()
        for name, seed, run in runs:
            assert await run == said(cluster, names[name], max_tokens=MANY, seed=seed)
        assert cluster.gateway.telemetry.resumes._value.get() > 0


async def test_a_stream_keeps_the_weights_that_it_began_with(start: Any, write: Write) -> None:
    """Also if its group is lost after other weights were loaded under the name."""
    async with start(num_groups=2, nodes=2) as cluster:
        adapters = cluster.models.adapters
        await adapters.load("red", str(write("red", seed=1)))
        old = digest_of(cluster, "red")
        cluster.take_steps_of(0.01)
        first = asyncio.ensure_future(tokens(cluster, "red", max_tokens=MANY))
        while not any(
            group.engine_loop.stats.num_output_tokens for group in cluster.groups.values()
        ):
            await asyncio.sleep(0.01)
        await adapters.load("red", str(write("red", seed=2)))
        new = digest_of(cluster, "red")
        assert new != old
        assert await tokens(cluster, "red") == said(cluster, new)
        await adapters.unload("red")
        with pytest.raises(grpc.aio.AioRpcError, match="'red' does not exist"):
            await tokens(cluster, "red")
        (busy,) = [each for each in cluster.groups.values() if each.engine_loop.num_requests]
        await busy.kill()
        assert await first == said(cluster, old, max_tokens=MANY)


async def test_a_bad_adapter_changes_nothing(start: Any, write: Write, tmp_path: Path) -> None:
    async with start(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        await cluster.models.adapters.load("red", str(write("red", seed=1)))
        before = digest_of(cluster, "red")
        bad = {
            "peft_type='IA3'": write("bad", seed=2, peft_type="IA3"),
            "rank 65 is above 64": write("deep", seed=2, r=65),
            "adapter_config.json": tmp_path / "nothing",
        }
        for what, folder in bad.items():
            for name in ("red", "green"):
                answer = await client.post(
                    f"{cluster.http_url}/v1/load_lora_adapter",
                    json={"lora_name": name, "lora_path": str(folder)},
                )
                assert answer.status_code == 400
                assert what in answer.json()["error"]["message"], answer.text
        for name in ("hash", "", "a\nb", "x" * 300):
            answer = await client.post(
                f"{cluster.http_url}/v1/load_lora_adapter",
                json={"lora_name": name, "lora_path": str(tmp_path / "red")},
            )
            assert answer.status_code == 400
            assert "lora_name" in answer.json()["error"]["message"]
        assert [each.name for each in cluster.models.adapters] == ["red"]
        assert digest_of(cluster, "red") == before
        assert await tokens(cluster, "red") == said(cluster, before)


async def test_an_adapter_that_cannot_be_read_in_time_does_not_hold_up_others(
    start: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    async with start(num_groups=1) as cluster:
        adapters, keeper = cluster.models.adapters, cluster.models.named(None).keeper
        with monkeypatch.context() as patched:
            patched.setattr(serving_adapters, "_KEEP_TIMEOUT_S", 0.01)
            patched.setattr(keeper, "keep", lambda source: may_end.wait())
            with pytest.raises(AdapterError, match=r"^slow: was not read within 0\.01 s"):
                await adapters.load("red", "slow")
        await adapters.load("blue", str(write("blue", seed=1)))
        assert [each.name for each in adapters] == ["blue"]
        may_end.set()


async def test_without_the_setting_no_adapter_is_taken(
    start_cluster: Any, write: Write, tmp_path: Path
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{cluster.http_url}/v1/load_lora_adapter",
            json={"lora_name": "red", "lora_path": str(write("red", seed=1))},
        )
    assert answer.status_code == 400
    assert "--enable-lora" in answer.json()["error"]["message"]


@pytest.mark.slow
async def test_a_group_that_comes_later_is_given_what_it_needs_by_another_one(
    start: Any, start_group: Any, write: Write, tmp_path: Path
) -> None:
    """The gateway's node has lost the files in the meantime."""
    async with start(num_groups=1, nodes=1) as cluster:
        await cluster.models.adapters.load("red", str(write("red", seed=1)))
        digest = digest_of(cluster, "red")
        own = cluster.gateway.keeper.store
        (own.root / digest).rename(tmp_path / "gone")
        store = AdapterStore(tmp_path / "late")
        async with start_group("late", store=store, enable_lora=True) as late:
            addresses = [group.address for group in (*cluster.groups.values(), late)]
            cluster.connections.set_addresses(addresses)
            await cluster.wait_ready(2)
            assert await tokens(cluster, "red") == said(cluster, digest)
            while GroupId("late") in cluster.connections.lacking(digest):
                await asyncio.sleep(0.01)
            assert store.folder(digest) is not None
            await cluster.groups["g0"].kill()
            assert await tokens(cluster, "red", seed=9) == said(cluster, digest, seed=9)
            # It loses its files too, and reports that to the next request.
            late.engine_loop._engine.lora.reading._kept.clear()
            (store.root / digest).rename(tmp_path / "lost")
            with pytest.raises(grpc.aio.AioRpcError, match="load it again"):
                await tokens(cluster, "red")
            (tmp_path / "gone").rename(own.root / digest)
            await asyncio.sleep(0)
            while True:  # The failure is remembered for a moment.
                try:
                    assert await tokens(cluster, "red") == said(cluster, digest)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.2)


async def test_pieces_with_another_digest_are_not_kept(start: Any, write: Write) -> None:
    async with start(num_groups=1, nodes=1) as cluster:
        (client,) = cluster.connections.clients

        async def pieces() -> Any:
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                data = (folder / name).read_bytes()
                yield group_pb2.AdapterPiece(digest="0" * 64, file=name, data=data)

        async def elsewhere() -> Any:
            yield group_pb2.AdapterPiece(digest="0" * 64, file="../x", data=b"x")

        folder = write("red", seed=1)
        for wrong, why in ((pieces, "have the digest"), (elsewhere, "must be of")):
            with pytest.raises(grpc.aio.AioRpcError, match=why):
                await client.link.WriteAdapter(wrong(), timeout=60)
        (group,) = cluster.groups.values()
        root = group.service._adapters._store.root
        assert list(root.iterdir()) == []
        answer = await client.link.HoldAdapter(
            group_pb2.HoldAdapterRequest(digest="../x"), timeout=60
        )
        assert not answer.is_held


async def test_operators_load_over_grpc_and_http_and_tenants_do_not(
    start: Any, write: Write
) -> None:
    keys = ApiKeys({"boss": EVERYONE, "guest": Caller(tenant="guest")})
    async with (
        start(num_groups=1, keys=keys) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        admin = admin_pb2_grpc.AdminStub(channel)
        source = str(write("red", seed=1))
        body = {"lora_name": "red", "lora_path": source, "load_inplace": True}
        for key, status in (("guest", 403), ("nobody", 401), ("boss", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
            assert answer.status_code == status, answer.text
        assert answer.text == "Success: LoRA adapter 'red' added successfully."
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await admin.ListAdapters(
                admin_pb2.ListAdaptersRequest(), metadata=(("authorization", "Bearer guest"),)
            )
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
        boss = (("authorization", "Bearer boss"),)
        loaded = await admin.LoadAdapter(
            admin_pb2.LoadAdapterRequest(name="also red", source=source), metadata=boss
        )
        listed = await admin.ListAdapters(admin_pb2.ListAdaptersRequest(), metadata=boss)
        assert [each.name for each in listed.adapters] == ["also red", "red"]
        assert {each.digest for each in listed.adapters} == {loaded.adapter.digest}
        unload = admin_pb2.UnloadAdapterRequest(name="also red")
        await admin.UnloadAdapter(unload, metadata=boss)
        with pytest.raises(grpc.aio.AioRpcError, match="there are: 'red'") as missing:
            await admin.UnloadAdapter(unload, metadata=boss)
        assert missing.value.code() == grpc.StatusCode.NOT_FOUND
        headers = {"Authorization": "Bearer boss"}
        gone = await client.post(
            "/v1/unload_lora_adapter", json={"lora_name": "red"}, headers=headers
        )
        assert gone.text == "Success: LoRA adapter 'red' removed successfully."
        listing = (await client.get("/v1/models", headers=headers)).json()["data"]
        assert [each["id"] for each in listing] == ["hash"]
        assert "parent" not in listing[0]


@pytest.mark.slow
async def test_gateways_tell_each_other_and_one_that_starts_asks(start: Any, write: Write) -> None:
    async with start(num_groups=1) as cluster:
        first = cluster.models.adapters
        second, third = Adapters(cluster.models), Adapters(cluster.models)
        deaf = True

        async def tell(words: Any) -> str:
            if deaf:
                return "1 of 1 other gateways did not answer"
            second.hear(words)
            return ""

        first.tell_others = tell
        source = str(write("red", seed=1))
        _, incomplete = await first.load("red", source)
        assert incomplete
        assert not list(second)
        deaf = False
        await first.load("blue", str(write("blue", seed=2)))
        while {each.name for each in second} != {"red", "blue"}:  # It is informed again.
            await asyncio.sleep(0.05)

        green = str(write("green", seed=3))
        configured = {"red": source, "green": green}
        await first.unload("red")
        third.hear([*first.words(), *second.words()])
        await third.configure("hash", configured)
        # A change at run time outweighs the older configuration.
        assert {each.name for each in third} == {"blue", "green"}

        # Its files have changed, but other gateways serve the old ones.
        write("green", seed=4)
        fourth, fifth = Adapters(cluster.models), Adapters(cluster.models)
        for each in (fourth, fifth):
            each.hear(third.words())
        await fourth.configure("hash", configured)
        assert list(fourth) == list(third)
        # One upgrade names another source; the next one removes the adapter.
        other = str(write("other", seed=5))
        await fifth.configure("hash", {"green": other, "lost": "/nowhere"})
        assert {each.name: each.source for each in fifth}["green"] == other
        await fifth.configure("hash", {})
        assert {each.name for each in fifth} == {"blue"}


async def test_late_words_do_not_undo_later_ones(start: Any, write: Write) -> None:
    async with start(num_groups=1) as cluster:
        words = [
            Word(at, "red", "hash", "x", digest) for at, digest in ((1, "a"), (2, "b"), (3, ""))
        ]
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)):
            other = Adapters(cluster.models)
            for place in order:
                other.hear([words[place]])
            assert not list(other)
            other.hear([Word(4, "red", "hash", "x", "a")])
            assert [each.digest for each in other] == ["a"]


async def test_as_many_unloaded_names_are_remembered_as_may_be_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving_adapters, "MAX_ADAPTERS", 40)
    adapters = Adapters(Models())
    for number in range(60):
        adapters.hear([Word(number + 1, f"name{number}", "hash", "x", "")])
        assert len(adapters.words()) == min(number + 1, 40)
    assert adapters.words()[0].name == "name20"
