"""Simulated requests and their answers, each of which has exactly one right text.

Every chunk is compared on arrival with the model's continuation of the prompt. An answer must end
with a finish reason and all of its tokens, a request with all of its answers or an error.
"""

from dataclasses import dataclass, field

import grpc.aio
from tests.sim.cluster import SimGateway
from tests.sim.model import EOS, POISON, HashModel

from quire.v1 import inference_pb2 as pb
from quire.worker.request.sampling_params import MAX_SEED


class Wrong(AssertionError):
    """The cluster broke a guarantee."""


@dataclass
class Answer:
    """One completion, as far as it was received."""

    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    expected: list[int] = field(default_factory=list)
    """The only right tokens; set when the seed is known."""
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
    """Mean pause between two reads."""
    cancel_at: int | None = None
    """Number of tokens after which the client cancels."""
    deadline_s: float | None = None
    """Seconds from the request's beginning to its deadline."""
    leaves_late: bool = False
    """Whether the client waits for the gateway's deadline error, as gRPC clients do not."""
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
        """Number of tokens received in all answers."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def ttft_s(self) -> float:
        """Time to the first token, which must have arrived."""
        assert self.first_s is not None
        return self.first_s - self.begin_s

    @property
    def is_refused(self) -> bool:
        """Whether the gateway refused for lack of room and said when to retry."""
        error = self.error
        return error is not None and "retry-after" in dict(error.trailing_metadata() or ())

    @property
    def is_poison(self) -> bool:
        return POISON in self.prompt

    def request(self) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self.prompt),
            sampling=pb.SamplingParams(
                n=self.num_answers,
                seed=self.seed,
                max_tokens=self.max_tokens,
                ignore_eos=self.ignore_eos,
            ),
            cache_salt=self.salt,
            priority=self.priority,
        )

    def take(self, chunk: pb.GenerateResponse, model: HashModel, *, now_s: float) -> None:
        """Adds a chunk. Raises Wrong if it is not the expected one."""
        self.last_s = now_s
        if not chunk.index < self.num_answers:
            raise Wrong(f"{self} got an answer {chunk.index}")
        answer = self.answers[chunk.index]
        if answer.tokens:
            self.largest_gap_s = max(self.largest_gap_s, now_s - answer.last_s)
        answer.last_s = now_s
        if chunk.HasField("start"):
            self._start(answer, chunk, model)
        if answer.is_done:
            raise Wrong(f"{self}: answer {chunk.index} went on after its end")
        if chunk.token_offset != len(answer.tokens):
            raise Wrong(f"{self}: token {chunk.token_offset} came as {len(answer.tokens)}")
        answer.tokens += chunk.token_ids
        answer.text += chunk.text
        if self.first_s is None and answer.tokens:
            self.first_s = now_s
        if answer.tokens != answer.expected[: len(answer.tokens)]:
            raise Wrong(f"{self} has {answer.tokens}, not {answer.expected}")
        if chunk.finish_reason:
            self._finish(answer, chunk, model)

    def _start(self, answer: Answer, chunk: pb.GenerateResponse, model: HashModel) -> None:
        self.groups.append(chunk.start.routing.group)
        if self.seed is None:
            self.seed = (chunk.start.seed - chunk.index) % (MAX_SEED + 1)
        answer.seed = (self.seed + chunk.index) % (MAX_SEED + 1)
        if chunk.start.seed != answer.seed:
            raise Wrong(f"{self}: answer {chunk.index} has seed {chunk.start.seed}")
        answer.expected = model.continuation(
            self.prompt, seed=answer.seed, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )

    def _finish(self, answer: Answer, chunk: pb.GenerateResponse, model: HashModel) -> None:
        if len(answer.tokens) != len(answer.expected):
            raise Wrong(f"{self} ended after {len(answer.tokens)} of {len(answer.expected)} tokens")
        shown, reason = answer.tokens, pb.FINISH_REASON_LENGTH
        if answer.tokens[-1] == EOS and not self.ignore_eos:
            shown, reason = answer.tokens[:-1], pb.FINISH_REASON_STOP
        if chunk.finish_reason != reason:
            raise Wrong(f"{self} ended with {chunk.finish_reason}, not {reason}")
        text = model.tokenizer.decode(shown)
        if answer.text != text:
            raise Wrong(f"{self} has the text {answer.text!r}, not {text!r}")
        answer.is_done = True
        if all(each.is_done for each in self.answers):
            self.outcome = "done"
