"""Runs a Llama with random weights in the engine's model runner: decode steps and a workload."""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench.gpu.lines import Lines
from bench.gpu.shapes import BLOCK_SIZE, Scale, check_fits
from bench.gpu.timings import Timer
from torch import Tensor

from quire.worker.blocks.hashing import as_token_ids
from quire.worker.group_engine import GroupEngine
from quire.worker.model import load
from quire.worker.model.config import read_model_spec
from quire.worker.model.facts import ModelFacts
from quire.worker.model.spec import Experts, ModelSpec
from quire.worker.rank.executor import InProcessExecutor
from quire.worker.rank.runner import ModelRunner
from quire.worker.request.config import EngineConfig
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.step.messages import StepInput
from quire.worker.step.sampling_batch import SamplingBatch
from quire.worker.weights.checkpoint import TensorInfo
from quire.worker.weights.loader import Weights

SHAPE = "Llama 8B"


def model_timings(timer: Timer) -> None:
    """Decode steps call by call and as a graph, prefill steps, a workload; memory as predicted."""
    scale, ceilings, lines = timer.scale, timer.ceilings, timer.lines
    with engine_rank(scale, lines) as (executor, config):
        runner = executor._runner
        assert runner is not None
        model = read_model_spec(config.model)
        for rows, context in scale.decodes:
            step = decode_step(rows, context, model.vocab_size)
            floor_s = _decode_bytes(model, rows, context, scale) / ceilings.copy_bytes_per_s
            for way in ways(runner):
                if not lines.begin(f"decode step {rows} x {context}, {way}"):
                    continue
                for part, duration in _step_seconds(runner, step, scale).items():
                    lines.timing(
                        SHAPE,
                        f"decode step {rows} x {context}, {part}",
                        f"quire, {way}",
                        seconds=duration,
                        rate=f"{rows / duration:.0f} tokens/s",
                        floor_s=floor_s,
                    )
        for cached, new in scale.prompts:
            if not lines.begin(f"prefill {new} after {cached}"):
                continue
            step = prompt_step(cached, new, model.vocab_size)
            duration = _step_seconds(runner, step, scale)["logits"]
            flops = _prefill_flops(model, cached, new)
            read_s = _decode_bytes(model, 1, cached, scale) / ceilings.copy_bytes_per_s
            lines.timing(
                SHAPE,
                f"prefill step {new} after {cached}",
                "quire",
                seconds=duration,
                rate=f"{flops / duration / 1e12:.1f} TFLOP/s",
                floor_s=max(flops / ceilings.matmul_flops, read_s),
            )
        if lines.begin("end to end"):
            _workload(executor, config, scale, lines)
        if scale.device.type == "cuda":
            lines.fact("memory allocated at most, GiB", torch.cuda.max_memory_allocated() / 2**30)


def ways(runner: ModelRunner) -> Iterator[str]:
    """Yields the modes of a decode step; sets each on the runner, and restores it at the end."""
    graphs = runner._graphs
    for way, used in {"call by call": None, "graph": graphs}.items():
        if way == "graph" and graphs is None:
            continue
        runner._graphs = used
        yield way
    runner._graphs = graphs


@contextmanager
def engine_rank(
    scale: Scale, lines: Lines | None = None
) -> Iterator[tuple[InProcessExecutor, EngineConfig]]:
    """An engine's only rank, with weights that are drawn where they are used.

    Raises:
        DoesNotFit: The device is too small. Nothing was allocated.
    """
    if scale.device.type == "cuda":
        total = check_fits(scale, torch.cuda.mem_get_info()[0])
        if lines is not None:
            lines.fact("memory predicted, GiB", total / 2**30)
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(
            json.dumps(
                scale.llama
                | {
                    "architectures": ["LlamaForCausalLM"],
                    "max_position_embeddings": scale.max_model_len,
                    "rms_norm_eps": 1e-5,
                    "dtype": str(scale.dtype).removeprefix("torch."),
                }
            )
        )
        config = EngineConfig(
            model=Path(folder),
            device=scale.device.type,  # type: ignore[arg-type]
            max_model_len=scale.max_model_len,
            max_num_seqs=scale.max_num_seqs,
            max_num_batched_tokens=scale.max_num_batched_tokens,
            num_blocks=scale.num_blocks,
            block_size=BLOCK_SIZE,
            deterministic=lines is None or not lines.part_name.startswith("free_"),
        )
        start = time.perf_counter()
        with (
            mock.patch.object(load, "open_checkpoint"),
            mock.patch.object(Weights, "open", open_random),
        ):
            executor = InProcessExecutor(config)
        if lines is not None:
            lines.fact("start of a rank with its graphs, s", time.perf_counter() - start)
        try:
            assert executor._runner is not None
            for cache in itertools.chain(*executor._runner._kv):
                cache.normal_()  # what was there before may be NaN
            yield executor, config
        finally:
            executor.close()


class RandomWeights(Weights):
    """Drawn where a checkpoint's would be read: norms are ones, biases too."""

    def __init__(self, *, std: float, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._std = std
        self.stored = None
        self._unchecked = []

    def has(self, module: str) -> bool:
        """Whether a checkpoint has the tensor; there is no file here."""
        return False

    def _find(self, name: str, *shapes: tuple[int, ...]) -> TensorInfo:
        """A tensor of the shape that is asked for; there is no file to compare it with."""
        return TensorInfo(file=Path(), name=name, dtype="F32", shape=shapes[0])

    def refuse_unread(self, spec: ModelSpec, *, known: tuple[str, ...] = ()) -> None:
        pass

    def read_into(
        self,
        out: Tensor,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> None:
        del name, rows, columns
        if len(shape) == 1:
            out.fill_(1)
        else:
            out.normal_(std=self._std)


@contextmanager
def open_random(
    checkpoint: object, *, dtype: torch.dtype, device: torch.device, stored: object
) -> Iterator[RandomWeights]:
    """Replaces `Weights.open`."""
    del checkpoint, stored
    yield RandomWeights(std=0.02, dtype=dtype, device=device)


def _mlp_size(model: ModelSpec) -> int:
    mlp = model.layers[0].mlp
    assert not isinstance(mlp, Experts)
    return mlp.size


def _decode_bytes(model: ModelSpec, rows: int, context: int, scale: Scale) -> int:
    """What a step must read: each weight once, but of the embedding; and the rows' KV."""
    attention = model.layers[0].attention
    kv = rows * context * len(model.layers) * 2 * attention.num_kv_heads * attention.key_size
    return scale.dtype.itemsize * (_linear_elements(model) + kv)


def _linear_elements(model: ModelSpec) -> int:
    attention = model.layers[0].attention
    per_layer = model.hidden_size * (
        (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.key_size
        + 3 * _mlp_size(model)
    )
    return len(model.layers) * per_layer + model.vocab_size * model.hidden_size


def _prefill_flops(model: ModelSpec, cached: int, new: int) -> int:
    """Linear layers, with the LM head for one token, and attention's visible pairs."""
    head = model.vocab_size * model.hidden_size
    linear = 2 * (new * (_linear_elements(model) - head) + head)
    pairs = new * cached + new * (new + 1) // 2
    attention = model.layers[0].attention
    return linear + 4 * len(model.layers) * attention.num_heads * attention.key_size * pairs


def decode_step(rows: int, context: int, vocab_size: int) -> StepInput:
    """Greedy decodes of rows of ``context`` tokens, each in blocks of its own."""
    per_row = -(-context // BLOCK_SIZE)
    tables = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    last = context - 1
    return StepInput(
        token_ids_T=np.arange(rows, dtype=np.int64) % vocab_size,
        positions_T=np.full(rows, last, np.int64),
        slot_mapping_T=tables[:, -1].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables_BM=tables,
        seq_lens_B=np.full(rows, context, np.int32),
        query_starts_B1=np.arange(rows + 1, dtype=np.int32),
        num_decodes=rows,
        samples_S=np.arange(rows, dtype=np.int32),
        sampling=_greedy(rows, context),
    )


def prompt_step(cached: int, new: int, vocab_size: int) -> StepInput:
    """One prompt's tokens ``cached`` to ``cached + new``, behind KV that is there."""
    tokens = cached + new
    table = np.arange(-(-tokens // BLOCK_SIZE), dtype=np.int32)
    positions = np.arange(cached, tokens, dtype=np.int64)
    return StepInput(
        token_ids_T=np.random.default_rng(0).integers(0, vocab_size, tokens)[cached:],
        positions_T=positions,
        slot_mapping_T=table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_tables_BM=table[None],
        seq_lens_B=np.array([tokens], np.int32),
        query_starts_B1=np.array([0, new], np.int32),
        num_decodes=0,
        samples_S=np.array([new - 1], np.int32),
        sampling=_greedy(1, tokens),
    )


def _greedy(rows: int, position: int) -> SamplingBatch:
    zeros = np.zeros(rows, np.float32)
    ints = np.zeros(rows, np.int32)
    return SamplingBatch(
        temperature_S=zeros,
        top_p_S=zeros + 1,
        top_k_S=ints,
        min_p_S=zeros,
        seed_S=np.arange(rows, dtype=np.int64),
        position_S=np.full(rows, position, np.int64),
        num_logprobs_S=ints - 1,
    )


def _step_seconds(runner: ModelRunner, step: StepInput, scale: Scale) -> dict[str, float]:
    """Medians of the forward pass alone, and of a whole step with its token on the host."""
    durations: dict[str, list[float]] = {"logits": [], "tokens": []}
    for repeat in range(5 if scale.is_dry else 23):
        for name, call in (("logits", runner.forward), ("tokens", runner.execute)):
            start = time.perf_counter()
            call(step)
            if scale.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 3:
                durations[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in durations.items()}


def _workload(
    executor: InProcessExecutor, config: EngineConfig, scale: Scale, lines: Lines
) -> None:
    """Requests that arrive together and share nothing; and the wall time of its decode steps,
    beside which the step by itself shows what the host adds."""
    requests, prompt_len, max_tokens = scale.workload
    facts = ModelFacts(
        name="random",
        fingerprint="random",
        vocab_size=int(scale.llama["vocab_size"]),
        max_model_len=scale.max_model_len,
        eos_token_ids=(),
        kv_dtype="random",
    )
    engine = GroupEngine(config, facts, executor)
    for rows in sorted({1, min(32, requests), requests}):
        rng = np.random.default_rng(rows)
        params: Any = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        for number in range(rows):
            prompt = as_token_ids(rng.integers(0, facts.vocab_size, prompt_len).tolist())
            request_id = f"{rows}/{number}"
            engine.add_request(
                Prepared(request_id=request_id, prompt_token_ids=prompt, sampling=params)
            )
        start = time.perf_counter()
        num_tokens, decodes = 0, []
        while engine.has_work:
            before = time.perf_counter()
            brought = sum(len(delta.token_ids) for delta in engine.step())
            num_tokens += brought
            if brought == rows:
                decodes.append(time.perf_counter() - before)
        duration = time.perf_counter() - start
        if decodes:
            lines.fact(f"decode step of {rows} in the engine, ms", statistics.median(decodes) * 1e3)
        lines.timing(
            SHAPE,
            f"end to end, {rows} requests of {prompt_len} + {max_tokens}",
            "quire",
            seconds=duration,
            rate=f"{num_tokens / duration:.0f} output tokens/s",
            floor_s=None,
        )
