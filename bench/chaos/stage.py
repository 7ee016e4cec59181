"""The environment of faults: the cluster, the requests sent to it, and their expected results."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, cast

from bench.chaos.app import POISON
from bench.chaos.clients import Load
from bench.chaos.cluster import Cluster, NotReady
from bench.chaos.verdicts import Outcome, Reference, check_exact
from bench.serving.load import Request, Stream

from quire import demo_model
from quire.cluster.dialects.dialect import Dialect
from quire.cluster.dialects.formats import TOOL_FORMATS
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.tools import ToolUse, check_tools
from quire.llm import LLM, SamplingParams
from quire.worker.request.structured import Constraint, ConstraintKind, json_constraint

PROMPT_TOKENS = (16, 64)
_VOCAB = (3, 4000)  # Without the special tokens and the poison.


@dataclass(kw_only=True)
class Stage:
    cluster: Cluster
    requests: Sequence[Request]
    reference: Reference
    prefill_rate: float
    """Prompt tokens a second that the cluster computes with nothing beside, as measured before."""
    outcome: Outcome = field(default_factory=Outcome)
    """The observations of the current fault."""
    _struck_s: float = 0.0

    def salted(self, salt: str) -> list[Request]:
        """The requests as another tenant's: nothing of their prompts is cached."""
        return [replace(request, cache_salt=salt) for request in self.requests]

    def begin(self, salt: str, *, again: bool = False) -> Load:
        """Sends the salted requests to both gateways; returns when all are under way."""
        return self.send(self.salted(salt), again=again)

    def send(
        self, requests: Sequence[Request], gateways: Sequence[str] = (), *, again: bool = False
    ) -> Load:
        """Sends requests, to both gateways if not told to whom; returns when all are under way."""
        load = self.cluster.clients.load(requests, gateways or self.cluster.gateways, again=again)
        load.wait_begun()
        return load

    @contextmanager
    def deployed(self, *, loss: Mapping[str, float] = {}, **changes: Any) -> Iterator[None]:
        """The cluster with other settings, for the block, and then as it was."""
        before: dict[str, Any] = {name: self.cluster.settings.get(name) for name in changes}
        self.cluster.deploy(loss=loss, **changes)
        self.cluster.wait_ready()
        yield
        self.settle()
        self.cluster.deploy(loss={}, **before)
        self.cluster.wait_ready()

    def strike(self) -> float:
        """Records the time of the fault and returns it."""
        self._struck_s = now_s()
        return self._struck_s

    def settle(self) -> None:
        """Waits until the cluster is whole and idle again, if it was struck since the last time."""
        if self._struck_s:
            self.cluster.wait_ready()
            self.outcome.seen.append(f"whole and idle {now_s() - self._struck_s:.1f} s after it")
            self._struck_s = 0.0

    def see(self, what: str) -> None:
        self.outcome.seen.append(what)

    def check(self, holds: bool, what: str) -> None:
        self.outcome.check(holds, what)

    def check_exact(self, streams: Sequence[Stream]) -> None:
        check_exact(self.outcome, streams, self.reference)

    def check_resumed(self, before: float) -> None:
        """Checks that streams were resumed since the gateways' count was ``before``."""
        resumed = self.cluster.total("quire_resumes_total") - before
        self.see(f"{resumed:.0f} resumed")
        self.check(resumed > 0, "nothing was resumed: the fault hit nobody")


Act: TypeAlias = Callable[[Stage], None]
"""Injects a fault. Returns once the cluster can recover, for which `Fault.run` waits."""


class Fault(NamedTuple):
    what: str
    promise: str
    act: Act

    def run(self, stage: Stage) -> Outcome:
        stage = replace(stage, outcome=Outcome())
        try:
            self.act(stage)
            stage.settle()
        except NotReady as error:
            return Outcome(broken=[f"the cluster is not whole: {error}"])
        return stage.outcome


FAULTS: dict[str, Fault] = {}
"""In the order in which they happen, which is that of their modules and in these."""


def fault(name: str, what: str, promise: str) -> Callable[[Act], Act]:
    def add(act: Act) -> Act:
        FAULTS[name] = Fault(what, promise, act)
        return act

    return add


def make_requests(
    num_streams: int, *, num_tokens: int, prompt_tokens: tuple[int, int] = PROMPT_TOKENS
) -> list[Request]:
    """Every other one is greedy, the rest are sampled with seeds of their own."""
    low, high = prompt_tokens
    return [
        Request(
            name=f"request {number}",
            token_ids=prompt(number, low + number * 7 % (high - low)),
            max_tokens=num_tokens,
            temperature=0.9 * (number % 2),
            seed=number,
        )
        for number in range(num_streams)
    ]


def constrained(requests: Sequence[Request]) -> list[Request]:
    """The same requests, of which every other one must be JSON of a schema and the rest a call of a
    tool; too long for any to end before its ``max_tokens``."""
    record = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["red", "green", "blue"]},
        },
        "required": ["id", "name", "kind"],
        "additionalProperties": False,
    }
    records = {"type": "array", "items": record, "minItems": 1000}
    parameters = {"type": "object", "properties": {"records": records}, "required": ["records"]}
    function = {"name": "store", "parameters": parameters}
    tools = check_tools([{"type": "function", "function": function}])
    calls = next(each for each in TOOL_FORMATS if each.name == "hermes")
    call = constrain(
        Dialect(calls=calls), ToolUse(tools=tools, is_required=True), None, reasons=False
    )
    assert call is not None
    forms: list[dict[str, str]] = [
        {each.kind: each.text} for each in (json_constraint(records), call)
    ]
    return [
        replace(request, form=forms[number // 2 % 2], may_stop=True)
        for number, request in enumerate(requests)
    ]


def _constraint(form: Mapping[str, str]) -> Constraint | None:
    return next((Constraint(cast(ConstraintKind, kind), text) for kind, text in form.items()), None)


def prompt(number: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt that no other ``number`` gives."""
    low, high = _VOCAB
    return tuple(
        low + (number * 997 + i * (number % 89 + 7)) % (high - low) for i in range(num_tokens)
    )


def poison(*, num_tokens: int) -> Request:
    return Request(name="poison", token_ids=(*POISON, *prompt(0, 20)), max_tokens=num_tokens)


def offline(requests: Sequence[Request]) -> dict[str, list[int]]:
    """The offline engine's answer to each, alone, with one rank."""
    with LLM(
        demo_model.PATH, dtype="float32", num_blocks=128, num_threads=1, max_num_seqs=1
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": list(request.token_ids)} for request in requests],
            [
                SamplingParams(
                    temperature=request.temperature,
                    seed=request.seed,
                    max_tokens=request.max_tokens,
                    ignore_eos=not request.may_stop,
                    structured_outputs=_constraint(request.form),
                )
                for request in requests
            ],
            use_tqdm=False,
        )
    return {
        request.name: list(output.outputs[0].token_ids)
        for request, output in zip(requests, outputs, strict=True)
    }


def prefill_rate(cluster: Cluster, requests: Sequence[Request]) -> float:
    """Measures it, with prompts as long as half-finished streams."""
    burst = [
        replace(
            request,
            token_ids=prompt(number, len(request.token_ids) + request.max_tokens // 2),
            max_tokens=1,
            cache_salt="burst",
        )
        for number, request in enumerate(requests[: len(requests) // 2])
    ]
    load = cluster.clients.load(burst, cluster.gateways)
    load.wait_begun()
    streams = load.wait()
    begin_s = min(stream.sent_s for stream in streams)
    seconds = max(stream.ended_s for stream in streams) - begin_s
    return sum(len(request.token_ids) for request in burst) / seconds


def now_s() -> float:
    return time.monotonic()
