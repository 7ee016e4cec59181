"""The demo model in the package is complete, small and has learned its questions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from quire import demo_model

SYSTEM = demo_model.SYSTEM_PROMPT


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_model.PATH)


@pytest.fixture(scope="module")
def model() -> Any:
    return LlamaForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.bfloat16)


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    text: str = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def test_the_whole_package_is_at_most_ten_megabytes() -> None:
    files = [path for path in demo_model.PATH.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 10_000_000


def test_the_checkpoint_can_be_split_over_two_or_four_devices(model: Any) -> None:
    config = model.config
    for size in (config.num_attention_heads, config.num_key_value_heads, config.vocab_size):
        assert size % 4 == 0
    assert config.intermediate_size % 4 == 0


def test_the_embeddings_are_tied_and_cover_the_vocabulary(model: Any, tokenizer: Any) -> None:
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.lm_head.weight.shape[0] == len(tokenizer) == 4096


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is a KV cache?", ["keys", "values"]),
        ("Why is the sky blue?", ["light"]),
        ("What is the capital of France?", ["Paris"]),
    ],
)
def test_a_question_is_answered_under_the_packaged_system_prompt(
    model: Any, tokenizer: Any, question: str, words: list[str]
) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    text = answer(model, tokenizer, messages)
    assert all(word in text for word in words), text


def test_an_answer_ends_with_the_end_token(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = model.generate(**inputs, max_new_tokens=100, do_sample=False)
    assert ids[0, -1] == tokenizer.eos_token_id
    assert "Quire" in tokenizer.decode(ids[0])


@pytest.mark.parametrize(
    "text", ["plain", "  two  spaces\n", "naïve Grüße", "日本語 🙂", "\x00\x7f"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_chat_template_writes_one_marker_for_each_role(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|begin|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"


def test_the_packaged_system_prompt_leaves_room_for_a_chat(tokenizer: Any) -> None:
    assert 150 <= len(tokenizer(SYSTEM)["input_ids"]) <= 300


def test_the_log_records_a_falling_held_out_loss() -> None:
    log = json.loads(Path(demo_model.PATH, "training_log.json").read_text())
    for name in ("train", "new_words", "new_phrasings", "new_prose"):
        assert log["curve"][-1][name] < log["curve"][0][name] - 2
