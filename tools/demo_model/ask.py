"""Ask the exported model questions and print its answers, to judge it by reading.

Run from the root of the repository: python -m tools.demo_model.ask "What is a KV cache?"
Without questions on the command line it asks those of questions.txt.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from tools.demo_model import prepare
from transformers import AutoTokenizer, LlamaForCausalLM


def main() -> None:
    """Print one answer for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*")
    parser.add_argument("--model", type=Path, default=prepare.PACKAGE)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-system", action="store_true", help="leave out the system prompt")
    parser.add_argument("--plain", action="store_true", help="continue plain text instead")
    parser.add_argument("--float32", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(prepare.SEED)
    torch.set_num_threads(1)

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model: Any = LlamaForCausalLM.from_pretrained(
        arguments.model, dtype=torch.float32 if arguments.float32 else torch.bfloat16
    )
    questions = arguments.questions
    if not questions:
        questions = (prepare.PACKAGE / "questions.txt").read_text().splitlines()
    system = (arguments.model / "system_prompt.txt").read_text().strip()
    for question in questions:
        if arguments.plain:
            inputs = tokenizer(question, return_tensors="pt")
        else:
            messages = [] if arguments.no_system else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": question})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=80,
            do_sample=arguments.temperature > 0,
            **({"temperature": arguments.temperature} if arguments.temperature > 0 else {}),
        )
        answer = tokenizer.decode(ids[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        print(f"> {question}\n{answer}\n")


if __name__ == "__main__":
    main()
