"""A request's tokens depend on model, adapter, prompt, parameters and seed only. They are sampled
in bfloat16, so equal tokens show that all logits had equal bits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import peft_files
from tests.prepared import prepared
from tests.worker.engine_requests import run

from quire import demo_model
from quire.kernels.native import library as native
from quire.llm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.worker.parts.adapters.store import AdapterStore
from quire.worker.request.errors import ConfigError, InvalidRequest

PARAMS = SamplingParams(temperature=1.2, seed=11, max_tokens=24, ignore_eos=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 40},
    "two threads": {"num_threads": 2},
    "ahead": {"async_scheduling": True},
    "two slots": {"max_loras": 2},
    "one slot ahead": {"max_loras": 1, "async_scheduling": True},
    "preempted": {"num_blocks": 52, "max_model_len": 384, "max_loras": 2},
    "two ranks": {"tensor_parallel_size": 2, "max_loras": 3},
    "four ranks": {"tensor_parallel_size": 4},
}
NUM_ADAPTERS = 12

pytestmark = pytest.mark.skipif(
    native.library() is None, reason="there is no native library on this machine"
)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """No adapter, and adapters of several LoRA ranks, some of which change attention only."""
    folder = tmp_path_factory.mktemp("adapters")
    found: list[LoRARequest | None] = [None]
    for number in range(NUM_ADAPTERS):
        path = write_for_the_demo_model(
            folder / f"{number}",
            seed=number,
            rank=(8, 16, 1, 64)[number % 4],
            targets=peft_files.ATTENTION if number % 3 == 1 else peft_files.EVERYWHERE,
        )
        found.append(LoRARequest(f"adapter {number}", number + 1, str(path)))
    return found


def write_for_the_demo_model(path: Path, **options: Any) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH)
    return peft_files.write(path, model, size=0.6, dtype=torch.bfloat16, **options)


@pytest.fixture(scope="module")
def expected(adapters: list[LoRARequest | None]) -> list[list[int]]:
    """Tokens of each request alone, on one rank, without prefix caching."""
    with _llm(enable_prefix_caching=False) as llm:
        found = [_tokens(llm, [one], [chat])[0] for one, chat in _pairs(adapters)]
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_beside_others_each_adapter_says_what_it_says_alone(
    adapters: list[LoRARequest | None], expected: list[list[int]], variant: str
) -> None:
    pairs = _pairs(adapters)
    asked, chats = [one for one, _ in pairs], [chat for _, chat in pairs]
    with _llm(**VARIANTS[variant]) as llm:
        assert _tokens(llm, asked, chats) == expected
        assert _tokens(llm, asked[::-1], chats[::-1]) == expected[::-1]  # From the cache.
        stats = llm.engine.stats()
        if variant == "preempted":
            assert stats.num_preemptions > 0
        else:
            assert stats.num_hit_tokens > 0


def test_a_request_goes_on_behind_the_output_of_another_engine(
    adapters: list[LoRARequest | None], expected: list[list[int]]
) -> None:
    pairs = _pairs(adapters)[:4]
    with _llm() as llm:
        tokenizer = llm.get_tokenizer()
        digests = llm._digests([one for one, _ in pairs], num_prompts=len(pairs))
        requests = [
            prepared(
                f"{number}",
                tokenizer.apply_chat_template(chat),
                sampling=PARAMS,
                adapter=digest,
                resumed_token_ids=torch.tensor(tokens[:9]).numpy().astype("uint32"),
            )
            for number, ((_, chat), digest, tokens) in enumerate(
                zip(pairs, digests, expected, strict=False)
            )
        ]
        ended = run(llm.engine, *requests)
    for number, tokens in enumerate(expected[:4]):
        assert list(ended[f"{number}"].token_ids) == tokens[9:]


def test_the_same_content_is_one_adapter_whatever_it_is_called(
    adapters: list[LoRARequest | None], tmp_path: Path
) -> None:
    first = adapters[1]
    assert first is not None
    for file in Path(first.lora_path).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    chat = _chats()[0]
    with _llm() as llm:
        outputs = [
            llm.chat([chat], PARAMS, lora_request=one, use_tqdm=False)[0]
            for one in (first, adapters[2], None, LoRARequest("other", 99, str(tmp_path)))
        ]
        assert len(llm.engine.adapters) == 2
    cached = [output.num_cached_tokens for output in outputs]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0
    assert outputs[3].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_files_that_change_later_are_another_adapter(tmp_path: Path) -> None:
    path = write_for_the_demo_model(tmp_path / "adapter", seed=1)
    chat, asked = _chats()[0], LoRARequest("adapter", 1, str(path))
    with _llm() as llm:
        before = _tokens(llm, [asked], [chat])
        digest = llm.engine.adapters[-1]
        write_for_the_demo_model(path, seed=2)
        assert _tokens(llm, [asked], [chat]) != before
        tokens = llm.get_tokenizer().apply_chat_template(chat)
        ended = run(llm.engine, prepared("old", tokens, sampling=PARAMS, adapter=digest))
    assert [list(ended["old"].token_ids)] == before


def test_an_adapter_of_another_model_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ADAPTER_DIR", str(tmp_path / "store"))
    path = write_for_the_demo_model(tmp_path / "adapter", seed=1)
    weights = path / "adapter_model.safetensors"
    save_file({"x.lora_A.weight": torch.ones(8, 16)}, weights)
    asked = LoRARequest("adapter", 1, str(path))
    with _llm() as llm, pytest.raises(InvalidRequest, match=f"{weights}: tensor 'x.lora_A"):
        llm.chat([_chats()[0]], PARAMS, lora_request=asked, use_tqdm=False)
    assert [*(tmp_path / "store").iterdir()] == []


def test_constraints_prompt_scores_and_penalties_work_with_adapters(
    adapters: list[LoRARequest | None],
) -> None:
    digits = StructuredOutputsParams(regex=r"[0-9]{6}")
    params = [
        replace(PARAMS, structured_outputs=digits, ignore_eos=False),
        replace(PARAMS, prompt_logprobs=1),
        replace(PARAMS, temperature=0, frequency_penalty=0.5),
        PARAMS,
    ]
    chats = [_chats()[0]] * len(params)
    with _llm(enable_prefix_caching=False) as llm:
        alone = [
            llm.chat([chat], one, lora_request=adapters[2], use_tqdm=False)[0]
            for chat, one in zip(chats, params, strict=True)
        ]
    with _llm(max_num_batched_tokens=48, max_loras=1) as llm:
        asked = [adapters[2]] * len(params) + [adapters[3]] * len(params)
        together = llm.chat(chats + chats, params + params, lora_request=asked, use_tqdm=False)
    assert alone[0].outputs[0].text.isdigit()
    for one, other in zip(alone, together, strict=False):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.prompt_logprobs == other.prompt_logprobs
    assert together[5].prompt_logprobs != alone[1].prompt_logprobs


def test_requests_that_cannot_be_served_are_refused_before_any_runs(
    adapters: list[LoRARequest | None], tmp_path: Path
) -> None:
    chats = _chats()[:2]
    with _llm(enable_lora=False) as llm, pytest.raises(InvalidRequest, match="enable_lora=True"):
        _tokens(llm, [adapters[1]] * 2, chats)
    with _llm(max_lora_rank=32) as llm:
        with pytest.raises(InvalidRequest, match="3 entries of lora_request for 2 prompts"):
            _tokens(llm, adapters[:3], chats)
        with pytest.raises(InvalidRequest, match=r"lora_request .*rank 64, max_lora_rank is 32"):
            _tokens(llm, [None, adapters[4]], chats)
        with pytest.raises(InvalidRequest, match=r"'x': .*adapter_config\.json"):
            _tokens(llm, [LoRARequest("x", 1, str(tmp_path))] * 2, chats)
        tokens = llm.get_tokenizer().apply_chat_template(chats[0])
        ended = run(llm.engine, prepared("x", tokens, sampling=PARAMS, adapter="ab" * 32))
        assert "has no adapter of this digest" in str(ended["x"].error)
        assert llm.engine.stats().num_output_tokens == 0


def test_an_adapter_of_another_shape_ends_only_its_own_request(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4})
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    halves = {"A": torch.zeros(4, 128), "B": torch.zeros(256, 4)}
    save_file({name.format(half): each for half, each in halves.items()}, _weights(tmp_path))
    with _llm() as llm:
        # Another process, which serves another model, put it there.
        digest = AdapterStore().put(tmp_path)
        tokens = llm.get_tokenizer().apply_chat_template(_chats()[0])
        ended = run(
            llm.engine,
            prepared("bad", tokens, sampling=PARAMS, adapter=digest),
            prepared("good", tokens, sampling=PARAMS),
        )
    assert r"has shape [4, 128], where" in str(ended["bad"].error)
    assert ended["good"].finish_reason == "length"


def test_models_of_other_modules_take_no_adapters() -> None:
    with pytest.raises(ConfigError, match="enable_lora=True: a model that runs through"):
        _llm(model_impl="transformers")


def _weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def _chats() -> list[list[dict[str, str]]]:
    system = {"role": "system", "content": demo_model.SYSTEM_PROMPT}
    return [[system, {"role": "user", "content": text}] for text in demo_model.QUESTIONS[:3]]


def _pairs(
    adapters: list[LoRARequest | None],
) -> list[tuple[LoRARequest | None, list[dict[str, str]]]]:
    return [(one, _chats()[number % 3]) for number, one in enumerate(adapters)]


def _llm(**settings: Any) -> LLM:
    base: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": 256, "num_threads": 1}
    base |= {"max_num_seqs": 16, "enable_lora": True}
    return LLM(demo_model.PATH, **(base | settings))


def _tokens(
    llm: LLM, asked: list[LoRARequest | None], chats: list[list[dict[str, str]]]
) -> list[list[int]]:
    outputs = llm.chat(chats, PARAMS, lora_request=asked, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
