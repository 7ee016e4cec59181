"""OpenVINO GenAI's continuous batching, with prefix caching, on an exported checkpoint."""

from functools import partial

import numpy as np
import openvino
import openvino_genai as genai

PACKAGES = ("openvino-genai", "openvino")


class Engine:
    def __init__(self, model: str, *, dtype: str, threads: int) -> None:
        self._open = partial(_pipeline, model, dtype=dtype, threads=threads)
        self._pipeline = self._open()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        config = genai.GenerationConfig(
            max_new_tokens=new_tokens, min_new_tokens=new_tokens, ignore_eos=True, do_sample=False
        )
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = self._pipeline.generate(ids, [config] * len(ids))
        return [list(result.m_generation_ids[0]) for result in results]

    def forget(self) -> None:
        """Has no call for it: another pipeline is opened, outside what is timed."""
        del self._pipeline
        self._pipeline = self._open()


def load(checkpoint: str, *, dtype: str, threads: int) -> Engine:
    return Engine(checkpoint, dtype=dtype, threads=threads)


def _pipeline(model: str, *, dtype: str, threads: int) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 128
    hint = "f32" if dtype == "float32" else "bf16"
    properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": threads}
    return genai.ContinuousBatchingPipeline(
        model, scheduler_config=scheduler, device="CPU", properties=properties
    )
