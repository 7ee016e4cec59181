"""Tests whether clients notice changes of models and adapters while they stream.

    python -m bench.models [--streams 1000] [--at-once 24] [--tokens 40]

One cluster on this machine serves the models ``a`` and ``b``, two replica groups each, two adapters
of ``a`` and one of ``b``, and a model whose weights are NaN, so that its groups cannot start. Many
streams run at once, half of them greedy, half sampled with a seed. Meanwhile, in turns: ``a`` is
replaced by other weights and back, an adapter gets other weights under its name and back, a group
of ``b`` is killed. The offline engine, with one model alone, has made every answer before.

A stream *failed* if it did not end at its length. It is *mixed* if its tokens are not one of the
answers of its model and adapter since it began. The exit status is 1 if there is any such stream.
"""

import asyncio
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from bench.adapter_load import write_adapter
from bench.report import command, percentile
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream
from safetensors.torch import load_file, save_file

from quire import demo_model
from quire.cluster.config import ClusterConfig, LoraModule, ModelConfig
from quire.cluster.deploy.app import Endpoints, running_cluster
from quire.llm import LLM, LoRARequest, SamplingParams
from quire.worker.request.config import EngineConfig

NAME = "bench-models"
ADAPTERS = {"a-law": "a", "a-code": "a", "b-chat": "b"}
"""Names, and the model of each."""
NUM_PROMPTS = 12
PROMPT_TOKENS = 40
SETTLE_S = 2.0

Version = tuple[str, str]
"""The folders of a model and of an adapter; the latter is empty for the model alone."""


def main() -> None:
    parser = command("bench.models", __doc__)
    parser.add_argument("--streams", type=int, default=1000, help="at least so many")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder))
        asks = list(_asks(arguments.tokens))
        started_s = time.monotonic()
        answers = {version: files.answers(version, asks) for version in files.versions()}
        print(f"{len(answers)} versions answered offline, {time.monotonic() - started_s:.0f} s")
        with running_cluster(files.config(), name=NAME) as endpoints:
            load = Load(asks, answers, at_once=arguments.at_once)
            asyncio.run(_run(load, Changes(files, endpoints, load), arguments.streams))
    for name, value in load.figures().items():
        print(f"{name:28} {value}")
    sys.exit(bool(load.failed or load.mixed))


def _asks(num_tokens: int) -> Iterator[Request]:
    """What streams ask for, of whichever model."""
    draw = random.Random(1)
    shared = [draw.randrange(10, 200) for _ in range(PROMPT_TOKENS // 2)]
    for number in range(NUM_PROMPTS):
        own = [draw.randrange(10, 200) for _ in range(PROMPT_TOKENS // 2)]
        yield Request(
            name=f"ask {number}",
            token_ids=[*shared, *own],
            max_tokens=num_tokens,
            temperature=number % 2 * 0.8,
            seed=100 + number,
        )


class Files:
    """The checkpoints and adapters."""

    def __init__(self, folder: Path) -> None:
        self.models = {
            name: _perturbed(folder / name, seed) for seed, name in enumerate(("a1", "a2", "b1"))
        }
        self.broken = _perturbed(folder / "broken", 9, scale=float("nan"))
        rank = itertools.cycle((4, 8))
        self.adapters = {
            name: write_adapter(folder / name, demo_model.PATH, seed, rank=next(rank))
            for seed, name in enumerate(("a-law1", "a-law2", "a-code1", "b-chat1"))
        }

    def config(self) -> ClusterConfig:
        common = {"dtype": "float32", "device": "cpu", "num_threads": 1, "num_blocks": 512}
        engine = EngineConfig(model=self.models["a1"], enable_lora=True, **common)  # type: ignore[arg-type]
        others = {"b": self.models["b1"], "broken": self.broken}
        return ClusterConfig(
            engine=engine,
            served_model_name="a",
            num_groups=2,
            more_models=tuple(
                ModelConfig(
                    engine=replace(engine, model=path),
                    served_model_name=name,
                    num_groups=2 if name == "b" else 1,
                    lora_modules=self._modules(name),
                )
                for name, path in others.items()
            ),
            lora_modules=self._modules("a"),
            grpc_port=0,
            http_port=0,
            drain_timeout_s=30,
        )

    def _modules(self, model: str) -> tuple[LoraModule, ...]:
        return tuple(
            LoraModule(name=name, path=str(self.adapters[f"{name}1"]))
            for name, its in ADAPTERS.items()
            if its == model
        )

    def versions(self) -> list[Version]:
        """Every model with every adapter that it may have."""
        made = []
        for model in self.models:
            adapters = [name for name in self.adapters if name[0] == model[0]]
            made += [(model, adapter) for adapter in ("", *adapters)]
        return made

    def answers(self, version: Version, asks: Sequence[Request]) -> list[tuple[int, ...]]:
        """The tokens of each of ``asks``, by the offline engine."""
        model, adapter = version
        lora = LoRARequest(adapter, 1, str(self.adapters[adapter])) if adapter else None
        params = [
            SamplingParams(
                temperature=each.temperature,
                seed=each.seed,
                max_tokens=each.max_tokens,
                ignore_eos=True,
            )
            for each in asks
        ]
        options = {"dtype": "float32", "device": "cpu", "num_threads": 2, "num_blocks": 512}
        with LLM(self.models[model], enable_lora=True, **options) as llm:  # type: ignore[arg-type]
            prompts = [{"prompt_token_ids": each.token_ids} for each in asks]
            made = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        return [tuple(each.outputs[0].token_ids) for each in made]


def _perturbed(folder: Path, seed: int, *, scale: float = 0.02) -> Path:
    """The demo model with other weights."""
    shutil.copytree(demo_model.PATH, folder)
    (file,) = folder.glob("*.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: value + scale * torch.randn(value.shape, generator=generator, dtype=torch.float32)
        if value.dim() > 1
        else value
        for name, value in load_file(file).items()
    }
    save_file({name: value.to(torch.float32) for name, value in tensors.items()}, file)
    return folder


@dataclass
class Load:
    """Streams of all models and adapters, one after the other ends; and what came of them."""

    asks: Sequence[Request]
    answers: dict[Version, list[tuple[int, ...]]]
    at_once: int
    failed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    num_done: Counter[str] = field(default_factory=Counter)
    by_version: Counter[Version] = field(default_factory=Counter)
    events: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    firsts_s: list[float] = field(default_factory=list)
    is_over: bool = False

    def __post_init__(self) -> None:
        self.current: dict[str, set[str]] = {"a": {"a1"}, "b": {"b1"}}
        self.current |= {name: {f"{name}1"} for name in ADAPTERS}
        """The versions that may answer, by what clients name; more than one during a change."""

    async def keep_up(self, address: str, number: int) -> None:
        """One client's streams, until it is over."""
        names = [*ADAPTERS, "a", "b"]
        draw = random.Random(number)
        async with Gateways([address]) as gateways:
            while not self.is_over:
                await self._one(gateways, draw.choice(names), draw.randrange(len(self.asks)))

    async def _one(self, gateways: Gateways, name: str, place: int) -> None:
        asked, model = self.asks[place], ADAPTERS.get(name, name)
        models, own = self.current[model], self.current[name]
        stream = Stream(request=replace(asked, model=name))
        await gateways.send(stream)
        self.num_done[name] += 1
        if stream.error is not None or stream.finish != "length":
            self.failed.append(f"{name}: {stream.error or stream.finish}")
            return
        token_ids = tuple(stream.tokens)
        self.firsts_s.append(stream.times[0] - stream.sent_s)
        gaps = (later - before for before, later in itertools.pairwise(stream.times))
        self.longest_gap_s = max(self.longest_gap_s, *gaps)
        # A change that began meanwhile may show or not.
        models, own = models | self.current[model], own | self.current[name]
        possible = itertools.product(models, own if name in ADAPTERS else [""])
        for version in possible:
            if self.answers[version][place] == token_ids:
                self.by_version[version] += 1
                return
        others = [v for v, listed in self.answers.items() if listed[place] == token_ids]
        self.mixed.append(f"{name}, ask {place}: tokens of {others or 'no version'}")

    def figures(self) -> dict[str, object]:
        return {
            "streams": dict(self.num_done) | {"all": self.num_done.total()},
            "by version": {"+".join(filter(None, each)): n for each, n in self.by_version.items()},
            "failed": self.failed[:5] and [len(self.failed), *self.failed[:5]],
            "mixed": self.mixed[:5] and [len(self.mixed), *self.mixed[:5]],
            "first token p50, p99 ms": [
                round(1000 * percentile(self.firsts_s, each)) for each in (50, 99)
            ],
            "longest gap ms": round(1000 * self.longest_gap_s),
            "changes": self.events,
        }


class Changes:
    """What happens to the cluster."""

    def __init__(self, files: Files, endpoints: Endpoints, load: Load) -> None:
        import ray

        self._files = files
        self._endpoints = endpoints
        self._load = load
        self._ray = str(ray.get_runtime_context().gcs_address)

    async def happen(self) -> None:
        """One round, which leaves everything as it was."""
        for version in ("2", "1"):
            await self._replace_model(f"a{version}")
            await self._replace_adapter(f"a-law{version}")
        await self._kill_group("b")

    async def _replace_model(self, version: str) -> None:
        path = self._files.models[version]
        await self._change("a", version, "model", "replace", "a", str(path), *self._at_ray())

    async def _replace_adapter(self, version: str) -> None:
        path = self._files.adapters[version]
        at = ("--address", self._endpoints.grpc)
        await self._change(
            "a-law", version, "adapter", "load", "a-law", str(path), "--model", "a", *at
        )

    async def _change(self, name: str, version: str, *arguments: str) -> None:
        current = self._load.current
        current[name] = current[name] | {version}
        began_s = time.monotonic()
        await self._quire(*arguments)
        current[name] = {version}
        self._load.events.append(f"{name} is {version}: {time.monotonic() - began_s:.1f} s")
        await asyncio.sleep(SETTLE_S)

    async def _kill_group(self, model: str) -> None:
        victim = next(_processes_of(model))
        os.kill(victim, signal.SIGKILL)
        self._load.events.append(f"group of {model} killed")
        await asyncio.sleep(5 * SETTLE_S)

    def _at_ray(self) -> tuple[str, ...]:
        return "--name", NAME, "--ray-address", self._ray

    async def _quire(self, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire", *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"quire {' '.join(arguments)}: {said.decode()}")


def _processes_of(model: str) -> Iterator[int]:
    """The processes of a model's groups."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if title.startswith("ray::ServeReplica:") and f":{NAME}:{model}:" in title:
            yield int(folder.name)


async def _run(load: Load, changes: Changes, num_streams: int) -> None:
    address = changes._endpoints.grpc
    clients = [asyncio.create_task(load.keep_up(address, n)) for n in range(load.at_once)]
    try:
        while load.num_done.total() < num_streams:
            await changes.happen()
    finally:
        load.is_over = True
        await asyncio.gather(*clients)


if __name__ == "__main__":
    main()
