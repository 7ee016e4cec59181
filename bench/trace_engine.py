"""A real engine whose model takes no time, and traces in Mooncake's format as requests for it.

Scheduler, block pool and hashing are those that serve; only the executor is none. The answers of
a trace have no names in it, so that no later prompt finds one here.
"""

import json
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench.step_overhead import InstantExecutor

from quire.worker import engine as engine_module
from quire.worker.bench.stopwatch import replaced
from quire.worker.blocks import BlockPool
from quire.worker.config import EngineConfig
from quire.worker.engine import Engine
from quire.worker.eviction import LowestUtility, PolicyFactory
from quire.worker.hashing import TokenIds
from quire.worker.model_facts import ModelFacts
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams
from quire.worker.trace_replay import TRACE_BLOCK_SIZE

FACTS = ModelFacts(
    name="none",
    fingerprint="none",
    vocab_size=1 << 31,
    max_model_len=1 << 20,
    eos_token_ids=(2,),
    kv_dtype="float32",
)


class TraceRequest(NamedTuple):
    block_names: list[int]
    """Of each 512 tokens of the prompt, the last, partial ones included."""
    num_tokens: int
    num_output_tokens: int


def read_requests(path: Path, *, limit: int | None = None) -> list[TraceRequest]:
    """The first requests of a trace, in order of arrival."""
    requests = []
    with path.open() as lines:
        for line in islice(lines, limit):
            fields = json.loads(line)
            requests.append(
                TraceRequest(
                    fields["hash_ids"], fields["input_length"], max(fields["output_length"], 1)
                )
            )
    return requests


def token_ids(request: TraceRequest) -> TokenIds:
    """Tokens that are equal where the names of the trace's blocks are."""
    starts = np.array(request.block_names, dtype=np.int64) * TRACE_BLOCK_SIZE
    tokens = starts[:, None] + np.arange(TRACE_BLOCK_SIZE)
    return tokens.reshape(-1)[: request.num_tokens].astype(np.uint32)


def make_engine(
    *,
    num_blocks: int,
    block_size: int,
    policy: PolicyFactory = LowestUtility,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 8192,
) -> Engine:
    config = EngineConfig(
        model=Path("none"),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_waiting=1 << 20,
    )
    with replaced(engine_module, "BlockPool", partial(BlockPool, policy=policy)):
        return Engine(config, FACTS, InstantExecutor(num_blocks))


def serve(engine: Engine, requests: Iterator[Request], *, concurrency: int) -> Iterator[int]:
    """Runs all requests, at most ``concurrency`` at a time; yields after each step how many have
    begun to run."""
    num_inside = num_begun = 0
    exhausted = False
    while True:
        while num_inside < concurrency and not exhausted:
            request = next(requests, None)
            if request is None:
                exhausted = True
            else:
                engine.add_request(request)
                num_inside += 1
        if not engine.has_work:
            return
        for delta in engine.step():
            num_begun += delta.token_offset == 0
            num_inside -= delta.finish_reason is not None
        yield num_begun


def as_request(number: int, prompt: TokenIds, num_output_tokens: int) -> Request:
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True, seed=0),
    )
