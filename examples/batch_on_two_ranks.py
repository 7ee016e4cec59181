"""Batch generation on two tensor-parallel ranks.

python examples/batch_on_two_ranks.py [CHECKPOINT]
"""

import sys

from quire import LLM, SamplingParams, demo_model


def main(model: str) -> None:
    """Completes a few chats in one batch and prints them."""
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=48, seed=1)
    chats = [[{"role": "user", "content": question}] for question in demo_model.QUESTIONS[:8]]
    with LLM(model, tensor_parallel_size=2, kv_cache_memory_bytes=64 * 2**20) as llm:
        for question, output in zip(demo_model.QUESTIONS, llm.chat(chats, params), strict=False):
            print(f"> {question}\n{output.outputs[0].text.strip()}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model.PATH))
