"""Where faults happen: the cluster, the requests that are sent at it, and what they must bring."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from bench.chaos.app import POISON
from bench.chaos.clients import Load
from bench.chaos.cluster import Cluster
from bench.chaos.verdicts import Outcome, Reference, tokens_to_recompute
from bench.serving.load import Request, Stream

from quire import demo_model
from quire.cluster.dialects.dialect import Dialect
from quire.cluster.dialects.formats import TOOL_FORMATS
from quire.cluster.dialects.grammar import constrain
from quire.cluster.dialects.tools import ToolUse, check_tools
from quire.llm import LLM, SamplingParams
from quire.worker.api.structured import Constraint, ConstraintKind, json_constraint

PROMPT_TOKENS = (16, 64)
MARGIN_S = 1.0
"""How much longer than detection and recompute a gap may be."""
_VOCAB = (3, 4000)  # Without the special tokens and the poison.


@dataclass(frozen=True, kw_only=True)
class Stage:
    cluster: Cluster
    requests: Sequence[Request]
    reference: Reference
    prefill_rate: float
    """Prompt tokens a second that the cluster computes with nothing beside, as measured before."""

    def salted(self, salt: str) -> list[Request]:
        """The requests as another tenant's: nothing of their prompts is cached."""
        return [replace(request, cache_salt=salt) for request in self.requests]

    def begin(self, salt: str, *, again: bool = False) -> Load:
        """Sends the salted requests to both gateways; returns when all are under way."""
        load = self.cluster.clients.load(self.salted(salt), self.cluster.gateways, again=again)
        load.wait_begun()
        return load

    def recompute_s(self, streams: Sequence[Stream], *, group: str, at_s: float) -> float:
        """The time to recompute the contexts of ``group``'s streams, one after the other."""
        return tokens_to_recompute(streams, group=group, at_s=at_s) / self.prefill_rate

    def settle(self, outcome: Outcome, *, since_s: float) -> None:
        """Waits until the cluster is whole and idle again; ``since_s`` is when it was struck."""
        self.cluster.wait_ready()
        outcome.seen.append(f"whole and idle {now_s() - since_s:.1f} s after it")


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
