"""Chats that share a system prompt: what each of them found in the prefix cache.

python examples/shared_system_prompt.py [CHECKPOINT]

`quire bench prefix` measures what that is worth, on a workload of your own.
"""

import sys

from quire import LLM, SamplingParams, demo_model


def main(model: str) -> None:
    """Prints, for each chat, how much of its prompt was reused."""
    params = SamplingParams(temperature=0, max_tokens=16)
    system = {"role": "system", "content": demo_model.SYSTEM_PROMPT}
    chats = [[system, {"role": "user", "content": question}] for question in demo_model.QUESTIONS]
    with LLM(model, kv_cache_memory_bytes=64 * 2**20) as llm:
        for question, output in zip(demo_model.QUESTIONS, llm.chat(chats, params), strict=True):
            num_prompt = len(output.prompt_token_ids)
            print(f"{output.num_cached_tokens:5d} of {num_prompt:4d} tokens reused  {question}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(demo_model.PATH))
