"""Block sizes compared: what each reuses, wastes and costs on one workload.

python examples/block_sizes.py [CHECKPOINT]
"""

import sys
import time

from quire import LLM, SamplingParams, demo_model


def main(model: str) -> None:
    """Prints a row per block size."""
    params = SamplingParams(temperature=0, max_tokens=16)
    system = {"role": "system", "content": demo_model.SYSTEM_PROMPT}
    chats = [
        [system, {"role": "user", "content": question}] for question in demo_model.QUESTIONS * 4
    ]
    print("block size  tokens/s  reused")
    for block_size in (4, 8, 16, 32, 64):
        with LLM(model, block_size=block_size, kv_cache_memory_bytes=64 * 2**20) as llm:
            llm.chat(chats[0], params, use_tqdm=False)  # Warm up: first calls are slower.
            llm.reset_prefix_cache()
            began_s = time.perf_counter()
            outputs = llm.chat(chats, params, use_tqdm=False)
            took_s = time.perf_counter() - began_s
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs)
        num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(
            f"{block_size:10d}  {(num_prompt + num_output) / took_s:8.0f}  "
            f"{num_cached / num_prompt:6.0%}"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model.PATH))
