"""vLLM on a CPU, through its offline API, in one process.

As it is configured by default, but for 4 GiB of KV cache, and for threads that are left to the
operating system instead of bound: its own choice keeps a core of a small machine for itself.
"""

import os

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

# vLLM reads its environment when it is imported.
from vllm import LLM, SamplingParams

PACKAGES = ("vllm-cpu", "torch")


class Engine:
    def __init__(self, checkpoint: str, *, dtype: str) -> None:
        self._llm = LLM(checkpoint, dtype=dtype, enable_prefix_caching=True)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True),
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        self._llm.reset_prefix_cache()


def load(checkpoint: str, *, dtype: str, threads: int) -> Engine:
    assert os.environ["OMP_NUM_THREADS"] == str(threads)  # How it is told, unbound.
    return Engine(checkpoint, dtype=dtype)
