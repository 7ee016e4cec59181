"""Whether an answer begins within reasoning is determined from its prompt."""

from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from quire.worker.blocks.hashing import as_token_ids
from quire.worker.text.reasoning import REASONING_FORMATS
from quire.worker.text.tokenizer import Tokenizer

FORMATS = {each.name: each for each in REASONING_FORMATS}
ENDS = ["<|im_start|>", "<|im_end|>"]
WORDS = ["a", " think", "\n", "<", ">", "/", "<think", "</think", "channel|>", "[THINK", "é"]


@cache
def tokenizer(*marks: str, special: bool = True) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=ENDS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the weather"], trainer)
    backend.add_tokens([tokenizers.AddedToken(mark, special=special) for mark in marks])
    return Tokenizer(backend)


def begun(name: str, prompt: str, *, kind: str = "special") -> bool | None:
    form = FORMATS[name]
    marks = [] if kind == "text" else [form.opens, form.closes]
    model = tokenizer(*marks, special=kind == "special")
    return form.begun(model, as_token_ids(model.encode(prompt)))


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", ["think", "mistral", "seed_oss", "gemma4"])
@given(before=st.lists(st.sampled_from(WORDS)), after=st.lists(st.sampled_from(WORDS)))
def test_the_answers_own_text_decides(
    name: str, kind: str, before: list[str], after: list[str]
) -> None:
    opens, closes = FORMATS[name].opens, FORMATS[name].closes
    start = f"<|im_start|>user\n{opens} or {closes}?{opens}<|im_end|>\n<|im_start|>assistant\n"
    text = "".join(before)
    rest = "".join(after)
    if opens in text + rest or closes in text + rest:
        return
    assert begun(name, start + text, kind=kind) is None
    assert begun(name, f"{start}{text}{opens}{rest}", kind=kind) is True
    assert begun(name, f"{start}{opens}{text}{closes}{rest}", kind=kind) is False
    assert begun(name, f"{start}{opens}{closes}{text}{opens}{rest}", kind=kind) is True


def test_a_long_prefill_is_within_reasoning() -> None:
    assert begun("think", f"<|im_start|>user\n?<|im_end|>\n<think>{'so on ' * 2000}") is True


def test_where_nothing_parts_the_turns_only_the_end_of_the_prompt_decides() -> None:
    assert begun("think", "[INST] What is <think>? [/INST]") is None
    assert begun("think", "[INST] What is <think>? [/INST] <think>\n") is True
    assert begun("think", "[INST] ? [/INST] <think>\n\n</think>\n\n") is False


def test_a_message_of_harmony_goes_on_in_its_channel() -> None:
    start = "<|im_start|>user<|message|>?<|end|><|im_start|>assistant"
    analysis = "<|channel|>analysis<|message|>So"
    assert begun("harmony", start) is None
    assert begun("harmony", start + analysis) is True
    assert begun("harmony", f"{start}{analysis}<|end|>") is False
