"""transformers' ``generate`` on a padless batch. It keeps no prefix between calls."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

PACKAGES = ("transformers", "torch")


class Engine:
    def __init__(self, checkpoint: str, *, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, dtype)
        )
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
        rows: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return rows

    def forget(self) -> None:
        pass


def load(checkpoint: str, *, dtype: str, threads: int) -> Engine:
    return Engine(checkpoint, dtype=dtype, threads=threads)
