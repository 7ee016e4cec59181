"""A Llama of random weights through the engine's own model runner: decode steps and a workload."""

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
from bench.gpu.shapes import Scale
from bench.gpu.timings import Timing
from bench.kernels import Ceilings

from quire.kernels.backend import AttentionBackend
from quire.kernels.decoder import DecoderLayer, DecoderWeights
from quire.worker import model_runner
from quire.worker.config import EngineConfig
from quire.worker.engine import Engine
from quire.worker.executor import InProcessExecutor
from quire.worker.hashing import as_token_ids
from quire.worker.model_config import LlamaConfig, read_model_config
from quire.worker.model_facts import ModelFacts
from quire.worker.model_runner import ModelRunner
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams
from quire.worker.step import SamplingBatch, StepInput

BLOCK_SIZE = 16
SHAPE = "Llama 8B"


def model_timings(scale: Scale, ceilings: Ceilings) -> Iterator[Timing]:
    """A decode step at each batch size, call by call and as a graph, then tokens per second."""
    with _executor(scale) as (executor, config):
        runner = executor._runner
        assert runner is not None
        model = read_model_config(config.model)
        for k_cache, v_cache in runner._kv:  # what was there before may be NaN
            k_cache.normal_()
            v_cache.normal_()
        for rows in scale.batch_sizes:
            step = _decode_step(rows, scale.context, model.vocab_size)
            floor_s = _floor_bytes(model, rows, scale.context) / ceilings.copy_bytes_per_s
            graphs = runner._graphs
            ways = {"call by call": None} | ({} if graphs is None else {"graph": graphs})
            for way, used in ways.items():
                runner._graphs = used
                for part, duration in _step_seconds(runner, step, scale).items():
                    yield Timing(
                        shape=SHAPE,
                        case=f"decode step {rows} x {scale.context}, {part}",
                        implementation=f"quire, {way}",
                        ms=duration * 1e3,
                        rate=f"{rows / duration:.0f} tokens/s",
                        share_of_limit=floor_s / duration,
                    )
            runner._graphs = graphs
        for rows in scale.batch_sizes[1:]:
            duration, num_tokens = _workload(executor, config, rows, scale)
            yield Timing(
                shape=SHAPE,
                case=f"end to end, {rows} requests of {scale.context // 2} + 128",
                implementation="quire",
                ms=duration * 1e3,
                rate=f"{num_tokens / duration:.0f} output tokens/s",
                share_of_limit=None,
            )


@contextmanager
def _executor(scale: Scale) -> Iterator[tuple[InProcessExecutor, EngineConfig]]:
    """An engine's only rank, with weights that are drawn where they are used."""
    most = max(scale.batch_sizes)
    with tempfile.TemporaryDirectory() as folder:
        config_file = Path(folder) / "config.json"
        config_file.write_text(
            json.dumps(
                scale.llama
                | {
                    "architectures": ["LlamaForCausalLM"],
                    "max_position_embeddings": 8192,
                    "rms_norm_eps": 1e-5,
                    "dtype": "float32" if scale.is_dry else "bfloat16",
                }
            )
        )
        config = EngineConfig(
            model=Path(folder),
            device=scale.device.type,  # type: ignore[arg-type]
            max_model_len=2 * scale.context,
            max_num_seqs=most,
            max_num_batched_tokens=max(8192, most) if not scale.is_dry else 64,
            num_blocks=(most + 1) * (2 * scale.context // BLOCK_SIZE + 1),
            block_size=BLOCK_SIZE,
        )
        with (
            mock.patch.object(model_runner, "open_checkpoint"),
            mock.patch.object(model_runner, "load_weights", _random_weights),
        ):
            executor = InProcessExecutor(config)
        try:
            yield executor, config
        finally:
            executor.close()


def _random_weights(
    checkpoint: object,
    config: LlamaConfig,
    *,
    shard: object,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
) -> DecoderWeights:
    del checkpoint, shard

    def draw(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02)

    hidden, head = config.hidden_size, config.head_size
    heads, kv_heads, mlp = config.num_heads, config.num_kv_heads, config.intermediate_size
    ones = torch.ones(hidden, dtype=dtype, device=device)
    return DecoderWeights(
        embedding_VC=draw(config.vocab_size, hidden),
        layers=tuple(
            DecoderLayer(
                attention_norm_C=ones,
                qkv=backend.pack_linear(draw((heads + 2 * kv_heads) * head, hidden)),
                o=backend.pack_linear(draw(hidden, heads * head)),
                mlp_norm_C=ones,
                gate_up=backend.pack_gated_linear(draw(2 * mlp, hidden)),
                down=backend.pack_linear(draw(hidden, mlp)),
            )
            for _ in range(config.num_layers)
        ),
        norm_C=ones,
        lm_head=backend.pack_linear(draw(config.vocab_size, hidden)),
    )


def _floor_bytes(model: LlamaConfig, rows: int, context: int) -> int:
    """What a decode step must read: each weight once, but of the embedding; and its KV."""
    head, itemsize = model.head_size, 2
    per_layer = model.hidden_size * (
        (2 * model.num_heads + 2 * model.num_kv_heads) * head + 3 * model.intermediate_size
    )
    weights = model.num_layers * per_layer + model.vocab_size * model.hidden_size
    kv = rows * context * model.num_layers * 2 * model.num_kv_heads * head
    return itemsize * (weights + kv)


def _decode_step(rows: int, context: int, vocab_size: int) -> StepInput:
    """Greedy decodes of rows of ``context`` tokens, each in blocks of its own."""
    per_row = -(-context // BLOCK_SIZE)
    tables = np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    last = context - 1
    zeros = np.zeros(rows, np.float32)
    ints = np.zeros(rows, np.int32)
    return StepInput(
        token_ids_T=np.arange(rows, dtype=np.int64) % vocab_size,
        positions_T=np.full(rows, last, np.int64),
        slot_mapping_T=tables[:, -1].astype(np.int64) * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables_BM=tables,
        seq_lens_B=np.full(rows, context, np.int32),
        query_starts_B1=np.arange(rows + 1, dtype=np.int32),
        num_decodes=rows,
        sample_rows_S=np.arange(rows, dtype=np.int32),
        sampling=SamplingBatch(
            temperature_S=zeros,
            top_p_S=zeros + 1,
            top_k_S=ints,
            min_p_S=zeros,
            seed_S=np.arange(rows, dtype=np.int64),
            position_S=np.full(rows, context, np.int64),
            num_logprobs_S=ints - 1,
        ),
    )


def _step_seconds(runner: ModelRunner, step: StepInput, scale: Scale) -> dict[str, float]:
    """Medians of the forward pass alone, and of a whole step with its token on the host."""
    durations: dict[str, list[float]] = {"logits": [], "tokens": []}
    for repeat in range(5 if scale.is_dry else 33):
        for name, call in (("logits", runner.forward), ("tokens", runner.execute)):
            start = time.perf_counter()
            call(step)
            if scale.device.type == "cuda":
                torch.cuda.synchronize()
            if repeat >= 3:
                durations[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in durations.items()}


def _workload(
    executor: InProcessExecutor, config: EngineConfig, rows: int, scale: Scale
) -> tuple[float, int]:
    """Requests that arrive together and share nothing: seconds and output tokens."""
    facts = ModelFacts(
        name="random",
        fingerprint="random",
        vocab_size=int(scale.llama["vocab_size"]),
        max_model_len=2 * scale.context,
        eos_token_ids=(),
        kv_dtype="random",
    )
    engine = Engine(config, facts, executor)
    rng = np.random.default_rng(rows)
    max_tokens = 4 if scale.is_dry else 128
    params: Any = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for number in range(rows):
        prompt = as_token_ids(rng.integers(0, facts.vocab_size, scale.context // 2).tolist())
        engine.add_request(Request(request_id=str(number), prompt_token_ids=prompt, params=params))
    start = time.perf_counter()
    num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    return time.perf_counter() - start, num_tokens
