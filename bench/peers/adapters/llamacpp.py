"""llama.cpp, through its C API: one batch of all sequences a step, as its server runs slots.

Each sequence has a stream of KV of its own, and flash attention is on: the fastest where prompts
are short or one is alone. (One KV for all sequences is twice as fast where prompts share, half as
fast where not; at 15M, 683 and 1,219 tokens/s.) The beginning that all prompts share is computed
once, in sequence 0, and copied to the others; what sequence 0 held before is kept, so that a later
call finds it, as prompt caching of the server does. The next token is numpy's argmax.
"""

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

PACKAGES = ("llama-cpp-python",)

BATCH_TOKENS = 2048
SEQUENCE_TOKENS = 1024
"""Room of each sequence; no prompt and its output are longer."""

Prompt = list[int]
Logits = npt.NDArray[np.float32]


class Engine:
    def __init__(self, model: str, *, dtype: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        file = str(Path(model) / "model.gguf").encode()
        self._model = llama_cpp.llama_model_load_from_file(file, parameters)
        assert self._model is not None
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._kv_type = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16
        self._threads = threads
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._num_sequences = 0
        self._kept: Prompt = []  # The tokens whose KV sequence 0 holds.
        self._make_room(1)

    def generate(self, prompts: list[Prompt], new_tokens: int) -> list[Prompt]:
        self._make_room(len(prompts))
        # The last token of a prompt is always computed, for its logits.
        shared = min(_common(prompts), min(map(len, prompts)) - 1)
        known = _common([prompts[0][:shared], self._kept])
        self._forget(0, known)
        first = [(0, known, prompts[0][known:shared])]
        self._decode(first, wants_logits=False)
        for sequence in range(1, len(prompts)):
            llama_cpp.llama_memory_seq_cp(self._memory, 0, sequence, 0, -1)
        rows = [(sequence, shared, prompt[shared:]) for sequence, prompt in enumerate(prompts)]
        outputs = [[token] for token in self._decode(rows, wants_logits=True)]
        for step in range(new_tokens - 1):
            rows = [
                (sequence, len(prompts[sequence]) + step, output[-1:])
                for sequence, output in enumerate(outputs)
            ]
            for output, token in zip(outputs, self._decode(rows, wants_logits=True), strict=True):
                output.append(token)
        for sequence in range(1, len(prompts)):
            self._forget(sequence, 0)
        self._kept = prompts[0] + outputs[0][:-1]
        return outputs

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self._kept = []

    def _make_room(self, num_sequences: int) -> None:
        """Another context, where this one has too few sequences; it touches all of its memory."""
        if num_sequences <= self._num_sequences:
            return
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = num_sequences * SEQUENCE_TOKENS
        parameters.n_batch = BATCH_TOKENS
        parameters.n_seq_max = num_sequences
        parameters.n_threads = parameters.n_threads_batch = self._threads
        # Flash attention computes partly in float16: in float32 its tokens are others.
        parameters.flash_attn_type = int(self._kv_type != llama_cpp.GGML_TYPE_F32)
        parameters.type_k = parameters.type_v = self._kv_type
        parameters.kv_unified = False
        parameters.no_perf = True
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        assert self._context is not None
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._num_sequences = num_sequences
        self._kept = []

    def _forget(self, sequence: int, length: int) -> None:
        """All of a sequence's KV from position ``length`` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, length, -1)

    def _decode(self, rows: list[tuple[int, int, Prompt]], *, wants_logits: bool) -> list[int]:
        """Computes tokens of sequences from a position on, as many together as fit in a batch.

        Returns the greedy next token of each, where ``wants_logits``.
        """
        chosen: list[int] = []
        start = 0
        while start < len(rows):
            end, size = start + 1, len(rows[start][2])
            while end < len(rows) and size + len(rows[end][2]) <= BATCH_TOKENS:
                size += len(rows[end][2])
                end += 1
            if size:
                self._run(rows[start:end], wants_logits=wants_logits)
            if wants_logits:
                chosen += self._logits(end - start).argmax(axis=1).tolist()
            start = end
        return chosen

    def _run(self, rows: list[tuple[int, int, Prompt]], *, wants_logits: bool) -> None:
        batch, index = self._batch, 0
        for sequence, position, tokens in rows:
            for offset, token in enumerate(tokens):
                batch.token[index] = token
                batch.pos[index] = position + offset
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = sequence
                batch.logits[index] = wants_logits and offset == len(tokens) - 1
                index += 1
        batch.n_tokens = index
        status = llama_cpp.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}"

    def _logits(self, num_rows: int) -> Logits:
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(address, (num_rows, self._vocab_size))


def load(checkpoint: str, *, dtype: str, threads: int) -> Engine:
    return Engine(checkpoint, dtype=dtype, threads=threads)


def _common(prompts: list[Prompt]) -> int:
    """How many tokens all of them begin with."""
    count = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count
