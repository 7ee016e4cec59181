"""Quire, through its offline API."""

from inspect import signature
from typing import Any

from quire.llm import LLM, SamplingParams

PACKAGES = ("torch",)


class Engine:
    def __init__(self, checkpoint: str, *, dtype: str, threads: int) -> None:
        options: Any = {"quantization": dtype} if dtype in ("int8", "w4") else {}
        # Random weights repeat themselves, which no real model's text does. Older checkouts do not
        # guess.
        if "speculation" in signature(LLM).parameters:
            options["speculation"] = False
        self._llm = LLM(
            checkpoint,
            dtype="float32" if dtype == "float32" else "bfloat16",
            num_threads=threads,
            kv_cache_memory_bytes=4 << 30,
            device="cpu",
            **options,
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        return [output.outputs[0].token_ids for output in outputs]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


def load(checkpoint: str, *, dtype: str, threads: int) -> Engine:
    return Engine(checkpoint, dtype=dtype, threads=threads)
