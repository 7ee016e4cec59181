"""The engines' workloads: prompts as token ids, greedy, a fixed number of new tokens.

Prompts are a function of workload, model and seed, so that every engine is given the same. A
repetition takes another seed: no engine can find in a cache what an earlier one left there.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, Shape

SHARED = 768
OWN = 48
SHORT = 16
NEW_TOKENS = 64
FIRST_TOKEN_ID = 3  # The first token id after the special tokens.

Prompt = list[int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the table for each model."""

    name: str
    title: str
    shared: int
    """Tokens that all prompts begin with."""
    own: int
    """Tokens of each prompt after the shared ones."""
    alone: bool = False
    """One request instead of the model's ``num_requests``."""
    new_tokens: int = NEW_TOKENS
    cached: bool = False
    """A prompt with the same beginning ran before; otherwise the prefix cache is empty."""
    dtype: str = "bfloat16"
    """"int8": weights and activations of the linear layers, the rest in bfloat16; "w4": weights of
    4 bits."""
    models: tuple[str, ...] = tuple(SHAPES)
    """The shapes that it is measured on."""
    fewer_requests: Mapping[str, int] = field(default_factory=dict)
    """By shape, where all of its requests would take minutes in any engine."""
    fresh_process: bool = False
    """Timed from the start of the process to the first token."""

    @property
    def unit(self) -> str:
        """The unit of the table's figure: output tokens a second, or the time to first token."""
        if self.fresh_process:
            return "s"
        return "ms" if self.new_tokens == 1 else "tokens/s"

    def num_requests(self, shape: Shape) -> int:
        return 1 if self.alone else self.fewer_requests.get(shape.name, shape.num_requests)

    def figure(self, seconds: float, shape: Shape) -> float:
        """The time that the whole took, in `unit`."""
        if self.unit == "tokens/s":
            return self.num_requests(shape) * self.new_tokens / seconds
        return seconds * 1e3 if self.unit == "ms" else seconds

    def prompts(self, shape: Shape, *, seed: int) -> tuple[list[Prompt], Prompt | None]:
        """The prompts to time, and the one to run before them if any."""
        rng = random.Random(f"{self.name} {shape.name} {seed}")
        shared = _tokens(rng, self.shared)
        prompts = [shared + _tokens(rng, self.own) for _ in range(self.num_requests(shape))]
        return prompts, shared + _tokens(rng, self.own) if self.cached else None


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="cold", title="all at once, cache empty", shared=SHARED, own=OWN),
        Workload(name="cached", title="prefix cached", shared=SHARED, own=OWN, cached=True),
        Workload(
            name="unshared",
            title="nothing shared",
            shared=0,
            own=SHARED + OWN,
            fewer_requests={"L": 8},
        ),
        Workload(name="decode", title="decode batch, 16-token prompts", shared=0, own=SHORT),
        Workload(name="stream", title="one stream", shared=0, own=SHORT, alone=True),
        Workload(
            name="ttft",
            title="TTFT, 816 tokens cold",
            shared=SHARED,
            own=OWN,
            alone=True,
            new_tokens=1,
        ),
        Workload(
            name="ttft-cached",
            title="TTFT, 816 tokens after a hit of 768",
            shared=SHARED,
            own=OWN,
            alone=True,
            new_tokens=1,
            cached=True,
        ),
        Workload(
            name="start",
            title="start to first token",
            shared=0,
            own=SHORT,
            alone=True,
            new_tokens=1,
            fresh_process=True,
        ),
        Workload(
            name="fp32",
            title="fp32, all at once, cache empty",
            shared=SHARED,
            own=OWN,
            dtype="float32",
            models=("S", "M", "qwen3-0.6b"),
        ),
        Workload(
            name="int8",
            title="int8, decode batch, 16-token prompts",
            shared=0,
            own=SHORT,
            dtype="int8",
        ),
        Workload(
            name="w4-stream",
            title="4 bits, one stream",
            shared=0,
            own=SHORT,
            alone=True,
            dtype="w4",
        ),
        Workload(
            name="w4",
            title="4 bits, decode batch, 16-token prompts",
            shared=0,
            own=SHORT,
            dtype="w4",
        ),
    )
}


def _tokens(rng: random.Random, count: int) -> Prompt:
    return [rng.randrange(FIRST_TOKEN_ID, VOCAB_SIZE) for _ in range(count)]
