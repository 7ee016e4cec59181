"""Clients: what they ask, how they read, and whether each answer is the only right one.

Every chunk is compared as it comes with what the model says from the prompt alone. An answer ends
with a finish reason and all of its tokens, or with an error; which errors may be is for the
scenario to say, by way of ``allows``.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
from tests.sim.cluster import MAX_MODEL_LEN, Cluster, SimGateway
from tests.sim.model import EOS, POISON, HashModel

from quire.v1 import inference_pb2 as pb
from quire.worker.sampling_params import MAX_SEED


class Wrong(AssertionError):
    """The cluster broke its promise."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What clients do, on the whole."""

    rate: float = 1.0
    """Requests a second."""
    burst: int = 0
    """Once a minute on average so many come within a second, whatever there is room for."""
    mean_output: int = 30
    num_documents: int = 4
    """Prompts begin with one of these, whose KV can be shared."""
    p_slow: float = 0.0
    """Reads with long pauses."""
    p_cancel: float = 0.0
    p_poison: float = 0.0
    p_deadline: float = 0.0
    p_several: float = 0.0
    """Asks for several completions of its prompt at once."""
    priorities: tuple[int, ...] = (0,)


@dataclass
class Answer:
    """One completion, as far as it has come."""

    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    expected: list[int] = field(default_factory=list)
    """The only right one, once the seed is known."""
    last_s: float = 0.0
    is_done: bool = False


@dataclass
class Ask:
    """One request and what became of it."""

    number: int
    prompt: list[int]
    max_tokens: int
    seed: int | None
    ignore_eos: bool
    salt: str
    begin_s: float
    pauses_s: float = 0.0
    """Between reads, on average."""
    cancel_at: int | None = None
    """Tokens after which the client loses interest."""
    deadline_s: float | None = None
    """From its beginning."""
    leaves_late: bool = False
    """Waits beyond its deadline for the gateway to say so, where gRPC would not."""
    num_answers: int = 1
    priority: int = 0
    gateway: SimGateway | None = None
    answers: list[Answer] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    first_s: float | None = None
    last_s: float = 0.0
    largest_gap_s: float = 0.0
    end_s: float | None = None
    outcome: str = "running"
    error: grpc.aio.AioRpcError | None = None

    def __str__(self) -> str:
        where = f"at {self.gateway.name if self.gateway else '?'} via {self.groups}"
        return (
            f"request {self.number} {where} since {self.begin_s:.3f} s ({len(self.prompt)} prompt "
            f"tokens, {self.num_answers} answers, {self.num_tokens} tokens of at most "
            f"{self.num_answers * self.max_tokens} received, last {self.last_s:.3f} s)"
        )

    @property
    def num_tokens(self) -> int:
        """Received, of all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def ttft_s(self) -> float:
        """To the first token, which has come."""
        assert self.first_s is not None
        return self.first_s - self.begin_s

    @property
    def is_refused(self) -> bool:
        """For want of room at the gateway, which then says when to come back."""
        error = self.error
        return error is not None and "retry-after" in dict(error.trailing_metadata() or ())

    @property
    def is_poison(self) -> bool:
        return POISON in self.prompt


class Clients:
    """Asks the cluster's gateways, and keeps every `Ask`."""

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        *,
        load: Load,
        allows: Callable[[Ask], bool],
        trace: Callable[[str], None],
    ) -> None:
        self.asks: list[Ask] = []
        self.running: dict[asyncio.Task[None], Ask] = {}
        self.wrong: list[Wrong] = []
        self._cluster = cluster
        self._model: HashModel = cluster.model
        self._rng = rng
        self._load = load
        self._allows = allows
        self._trace = trace
        self._documents = [
            [rng.randrange(200) for _ in range(rng.randrange(4, 100))]
            for _ in range(load.num_documents)
        ]

    async def arrive(self, *, until_s: float) -> None:
        """Open loop: new ones come whatever became of the others."""
        load, loop = self._load, self._cluster.loop
        begin_s = loop.time()
        steady = self._arrivals(load.rate, 1, begin_s, until_s)
        bursts = self._arrivals(1 / 60, load.burst, begin_s, until_s)
        for at_s in sorted(steady + bursts):
            await asyncio.sleep(at_s - loop.time())
            self.ask(self.draw())

    def _arrivals(self, rate: float, size: int, from_s: float, until_s: float) -> list[float]:
        """Times of arrival, of ``size`` within each second that ``rate`` draws."""
        times: list[float] = []
        at_s = from_s + self._rng.expovariate(rate)
        while at_s < until_s:
            times += [at_s + (self._rng.random() if size > 1 else 0.0) for _ in range(size)]
            at_s += self._rng.expovariate(rate)
        return times

    def draw(self) -> Ask:
        """One as the load has them."""
        rng, load = self._rng, self._load
        prompt = list(rng.choice(self._documents)) if rng.random() < 0.8 else []
        prompt += [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        if rng.random() < load.p_poison:
            prompt.append(POISON)
        room = MAX_MODEL_LEN - len(prompt)
        max_tokens = min(room, 1 + int(rng.expovariate(1 / load.mean_output)))
        return Ask(
            number=len(self.asks),
            prompt=prompt,
            max_tokens=max_tokens,
            seed=rng.randrange(2**63) if rng.random() < 0.8 else None,
            ignore_eos=rng.random() < 0.7,
            salt=rng.choice(["", "", "tenant"]),
            begin_s=self._cluster.loop.time(),
            pauses_s=rng.choice([0.05, 0.5, 3.0]) if rng.random() < load.p_slow else 0.0,
            cancel_at=rng.randrange(max_tokens) if rng.random() < load.p_cancel else None,
            deadline_s=rng.uniform(0.1, 5) if rng.random() < load.p_deadline else None,
            leaves_late=rng.random() < 0.5,
            num_answers=rng.choice([2, 3, 5]) if rng.random() < load.p_several else 1,
            priority=rng.choice(load.priorities),
        )

    def ask(self, ask: Ask) -> asyncio.Task[None]:
        """Begins it. What turns out to be wrong is in ``wrong``."""
        self.asks.append(ask)
        task = asyncio.get_running_loop().create_task(self._run(ask))
        self.running[task] = ask
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        ask = self.running.pop(task)
        ask.end_s = self._cluster.loop.time()
        self._trace(f"{ask.number} {ask.outcome} {ask.num_tokens} {ask.error and ask.error.code()}")
        if not task.cancelled() and (error := task.exception()) is not None:
            ask.outcome = "wrong"
            if not isinstance(error, Wrong):
                raise error
            self.wrong.append(error)

    async def _run(self, ask: Ask) -> None:
        gateways = self._cluster.gateways
        if not gateways:
            ask.outcome = "no gateway"
            return
        ask.gateway = self._rng.choice(gateways)
        ask.last_s = ask.begin_s
        ask.answers = [Answer() for _ in range(ask.num_answers)]
        network = self._cluster.network
        try:
            async with network.connect(
                ask.gateway.address, client=None, place="clients"
            ) as connection:
                deadline_s = None if ask.deadline_s is None else ask.begin_s + ask.deadline_s
                call = connection.server_stream("Generate", _request(ask), deadline_s=deadline_s)
                async with asyncio.timeout_at(None if ask.leaves_late else deadline_s):
                    async for chunk in call:
                        self._take(ask, chunk)
                        if ask.cancel_at is not None and ask.num_tokens > ask.cancel_at:
                            ask.outcome = "cancelled"
                            return
                        if ask.pauses_s:
                            await asyncio.sleep(self._rng.expovariate(1 / ask.pauses_s))
        except TimeoutError:
            ask.outcome = "deadline"
        except grpc.aio.AioRpcError as error:
            ask.outcome, ask.error = "error", error
            if not self._allows(ask):
                raise Wrong(
                    f"{ask} failed at {self._cluster.loop.time():.3f} s with "
                    f"{error.code().name}: {error.details()}"
                ) from error
        else:
            if ask.outcome == "running":
                raise Wrong(f"{ask} ended without an end")

    def _take(self, ask: Ask, chunk: pb.GenerateResponse) -> None:
        now_s = ask.last_s = self._cluster.loop.time()
        if not chunk.index < ask.num_answers:
            raise Wrong(f"{ask} got an answer {chunk.index}")
        answer = ask.answers[chunk.index]
        if answer.tokens:
            ask.largest_gap_s = max(ask.largest_gap_s, now_s - answer.last_s)
        answer.last_s = now_s
        if chunk.HasField("start"):
            self._start(ask, answer, chunk)
        if answer.is_done:
            raise Wrong(f"{ask}: answer {chunk.index} went on after its end")
        if chunk.token_offset != len(answer.tokens):
            raise Wrong(f"{ask}: token {chunk.token_offset} came as {len(answer.tokens)}")
        answer.tokens += chunk.token_ids
        answer.text += chunk.text
        if ask.first_s is None and answer.tokens:
            ask.first_s = now_s
        if answer.tokens != answer.expected[: len(answer.tokens)]:
            raise Wrong(f"{ask} has {answer.tokens}, not {answer.expected}")
        if chunk.finish_reason:
            self._finish(ask, answer, chunk)

    def _start(self, ask: Ask, answer: Answer, chunk: pb.GenerateResponse) -> None:
        ask.groups.append(chunk.start.routing.group)
        if ask.seed is None:
            ask.seed = (chunk.start.seed - chunk.index) % (MAX_SEED + 1)
        answer.seed = (ask.seed + chunk.index) % (MAX_SEED + 1)
        if chunk.start.seed != answer.seed:
            raise Wrong(f"{ask}: answer {chunk.index} has seed {chunk.start.seed}")
        answer.expected = self._model.continuation(
            ask.prompt, seed=answer.seed, max_tokens=ask.max_tokens, ignore_eos=ask.ignore_eos
        )

    def _finish(self, ask: Ask, answer: Answer, chunk: pb.GenerateResponse) -> None:
        if len(answer.tokens) != len(answer.expected):
            raise Wrong(f"{ask} ended after {len(answer.tokens)} of {len(answer.expected)} tokens")
        shown, reason = answer.tokens, pb.FINISH_REASON_LENGTH
        if answer.tokens[-1] == EOS and not ask.ignore_eos:
            shown, reason = answer.tokens[:-1], pb.FINISH_REASON_STOP
        if chunk.finish_reason != reason:
            raise Wrong(f"{ask} ended with {chunk.finish_reason}, not {reason}")
        text = self._model.tokenizer.decode(shown)
        if answer.text != text:
            raise Wrong(f"{ask} has the text {answer.text!r}, not {text!r}")
        answer.is_done = True
        if all(each.is_done for each in ask.answers):
            ask.outcome = "done"


def _request(ask: Ask) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ask.prompt),
        sampling=pb.SamplingParams(
            n=ask.num_answers,
            seed=ask.seed,
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
        ),
        cache_salt=ask.salt,
        priority=ask.priority,
    )
