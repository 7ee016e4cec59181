"""The offline API: it takes all kinds of prompts and returns outputs with vLLM's fields."""

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import demo_model, llm
from quire.llm import LLM, SamplingParams
from quire.worker.request.errors import CheckpointError, ConfigError, InvalidRequest
from quire.worker.request.scoring import EmbeddingUse
from quire.worker.text.template.chat_template import ChatTemplate

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM(demo_model.PATH, dtype="float32", num_blocks=128, num_threads=1) as engine:
        yield engine


def test_a_prompt_may_be_text_a_mapping_or_token_ids(demo: LLM) -> None:
    text = "A harbor is"
    ids = AutoTokenizer.from_pretrained(demo_model.PATH).encode(text)
    prompts: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = demo.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [ids] * 3
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert [output.prompt for output in outputs] == [text, text, None]
    assert demo.generate(text, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs


def test_text_and_logprobs_are_those_of_transformers(demo: LLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model.PATH)
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
    output = demo.generate("A planet is", params, use_tqdm=False)[0]
    completion = output.outputs[0]
    ids = [*output.prompt_token_ids, *completion.token_ids]
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert completion.logprobs is not None
    total = 0.0
    for index, token in enumerate(completion.token_ids):
        row = logprobs[len(output.prompt_token_ids) + index - 1]
        reported = completion.logprobs[index]
        assert set(row.topk(3).indices.tolist()) | {token} == set(reported)
        for token_id, entry in reported.items():
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry.decoded_token == tokenizer.decode([token_id])
        total += float(row[token])
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_biased_logits_choose_the_tokens_that_transformers_chooses(demo: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    free = demo.generate("The sea", GREEDY, use_tqdm=False)[0]
    bias = {free.outputs[0].token_ids[0]: -100.0, free.outputs[0].token_ids[2]: 3.5}
    params = replace(GREEDY, logit_bias=bias)
    biased = demo.generate("The sea", params, use_tqdm=False)[0]
    assert biased.outputs[0].token_ids != free.outputs[0].token_ids
    expected = cast(Any, model).generate(
        torch.tensor([biased.prompt_token_ids]),
        do_sample=False,
        max_new_tokens=len(biased.outputs[0].token_ids),
        sequence_bias={(token,): value for token, value in bias.items()},
    )
    assert expected[0, len(biased.prompt_token_ids) :].tolist() == list(biased.outputs[0].token_ids)


def test_only_allowed_tokens_are_sampled(demo: LLM) -> None:
    allowed = [5, 31, 32, 200]
    for temperature in (0.0, 1.5):
        params = SamplingParams(
            temperature=temperature, max_tokens=20, allowed_token_ids=allowed, seed=1
        )
        output = demo.generate("The sea", params, use_tqdm=False)[0].outputs[0]
        assert set(output.token_ids) <= set(allowed)
        assert len(output.token_ids) == 20
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        demo.generate("a", SamplingParams(allowed_token_ids=[10**6]), use_tqdm=False)


def test_a_truncated_prompt_is_its_last_tokens(demo: LLM) -> None:
    ids = AutoTokenizer.from_pretrained(demo_model.PATH).encode("A harbor is where ships rest")
    params = replace(GREEDY, prompt_logprobs=0)
    for given, kept in [(3, 3), (1, 1), (len(ids), len(ids)), (1000, len(ids)), (-1, len(ids))]:
        truncated = replace(params, truncate_prompt_tokens=given)
        twin: Any = {"prompt_token_ids": ids[-kept:]}
        expected = demo.generate(twin, params, use_tqdm=False)[0]
        for prompt in ("A harbor is where ships rest", {"prompt_token_ids": ids}):
            output = demo.generate(cast(Any, prompt), truncated, use_tqdm=False)[0]
            assert output.prompt_token_ids == ids[-kept:]
            assert output.prompt_logprobs == expected.prompt_logprobs
            assert output.outputs == expected.outputs
    long: Any = {"prompt_token_ids": [index % 4000 for index in range(3000)]}
    for max_tokens, num in [(8, 1016), (1, 1023), (1023, 1), (None, 1023)]:
        fitting = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            truncate_prompt_tokens=-1,
            stop_token_ids=[*range(1000)],
        )
        output = demo.generate(long, fitting, use_tqdm=False)[0]
        assert output.prompt_token_ids == long["prompt_token_ids"][-num:]
    for given, max_tokens, words in [
        (
            1025,
            8,
            "truncate_prompt_tokens=1025 is out of range: at most max_model_len, which is 1024",
        ),
        (1020, 8, r"prompt of 1020 tokens \+ max_tokens=8"),
        (-1, 1024, r"prompt of 1 tokens \+ max_tokens=1024"),
    ]:
        refused = SamplingParams(max_tokens=max_tokens, truncate_prompt_tokens=given)
        with pytest.raises(InvalidRequest, match=words):
            demo.generate(long, refused, use_tqdm=False)


def test_n_completions_differ_by_seed_and_share_the_prompt(demo: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8)
    together = demo.generate("The sea", params, use_tqdm=False)[0].outputs
    assert [completion.index for completion in together] == [0, 1, 2]
    alone = [
        demo.generate("The sea", SamplingParams(seed=5 + i, max_tokens=8), use_tqdm=False)
        for i in range(3)
    ]
    assert [c.token_ids for c in together] == [o[0].outputs[0].token_ids for o in alone]
    assert len({tuple(c.token_ids) for c in together}) > 1


def test_priorities_are_one_for_each_prompt_and_change_no_token(demo: LLM) -> None:
    prompts = ["A harbor is", "The sea", "A planet is"]
    usual = demo.generate(prompts, GREEDY, use_tqdm=False)
    other = demo.generate(prompts, GREEDY, use_tqdm=False, priority=[3, 0, -2])
    assert [o.outputs[0].token_ids for o in usual] == [o.outputs[0].token_ids for o in other]
    with pytest.raises(InvalidRequest, match="2 priorities for 3 prompts"):
        demo.generate(prompts, GREEDY, use_tqdm=False, priority=[1, 2])


def test_a_stop_string_ends_the_text_and_frees_the_request(demo: LLM) -> None:
    whole = demo.generate("A harbor is", SamplingParams(temperature=0, max_tokens=24))[0]
    stop = whole.outputs[0].text.split()[2]
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop])
    cut = demo.generate("A harbor is", params, use_tqdm=False)[0].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.text == whole.outputs[0].text[: whole.outputs[0].text.index(stop)]
    assert demo.engine.stats().num_held_blocks == 0


def test_a_stop_token_is_kept_in_the_ids_and_out_of_the_text(demo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    whole = demo.generate("A harbor is", params, use_tqdm=False)[0].outputs[0]
    token = whole.token_ids[3]
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[token])
    cut = demo.generate("A harbor is", params, use_tqdm=False)[0].outputs[0]
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", token)
    assert whole.text.startswith(cut.text)
    assert len(cut.text) < len(whole.text)


def test_max_tokens_none_fills_the_context(demo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = demo.generate({"prompt_token_ids": [9] * 1000}, params, use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 1024 - 1000
    assert output.outputs[0].finish_reason == "length"


def test_requests_without_a_seed_are_the_same_in_every_run() -> None:
    def run() -> list[list[int]]:
        with LLM(demo_model.PATH, num_blocks=128, num_threads=1, seed=3) as engine:
            outputs = engine.generate(["The sea"] * 3, SamplingParams(), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = run()
    assert first == run()
    assert len({tuple(tokens) for tokens in first}) > 1


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("", GREEDY, "prompt 0: prompt is empty"),
        (["fine", ""], GREEDY, "prompt 1: prompt is empty"),
        ({"prompt_token_ids": []}, GREEDY, "prompt 0: prompt is empty"),
        ({"prompt_token_ids": [1, 4096]}, GREEDY, r"4096 at position 1 .* 0 to 4095"),
        ({"prompt_token_ids": [1, -1]}, GREEDY, "must be integers, 0 or more"),
        ({"prompt_token_ids": "abc"}, GREEDY, "must be integers, 0 or more"),
        ({"text": "x"}, GREEDY, "a prompt is a string or a mapping with 'prompt'"),
        ({"cache_salt": "x"}, GREEDY, "a prompt is a string or a mapping with 'prompt'"),
        (17, GREEDY, "a prompt is a string or a mapping"),
        ({"prompt": 17}, GREEDY, "prompt 0: prompt must be a text, not 17"),
        ("x", SamplingParams(max_tokens=5000), "max_tokens=5000.*max_model_len is 1024"),
        ({"prompt_token_ids": [9] * 1024}, GREEDY, "prompt has 1024 tokens.*1023"),
        (["x", "y"], [GREEDY], "2 prompts and 1 sampling_params"),
        ("x", {"temperature": 0}, "sampling_params={'temperature': 0}: must be a SamplingParams"),
        (["x"], [{}], r"sampling_params=\[{}\]: must be a SamplingParams"),
    ],
)
def test_a_bad_prompt_is_named_and_none_is_run(
    demo: LLM, prompts: Any, params: Any, message: str
) -> None:
    steps = demo.engine.stats().num_steps
    with pytest.raises(InvalidRequest, match=message):
        demo.generate(prompts, params, use_tqdm=False)
    assert demo.engine.stats().num_steps == steps
    assert not demo.engine.has_work


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("temperature", -1),
        ("temperature", math.nan),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("seed", -1),
        ("stop", [""]),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("logprobs", 21),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("logit_bias", [5]),
        ("logit_bias", {-1: 2}),
    ],
)
def test_sampling_parameters_out_of_range_name_themselves(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}=.* is out of range: "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 24}, "block_size=24: must be a power of two from 4 to 128"),
        ({"tensor_parallel_size": 3}, "cannot share 8 attention heads .* possible: 1, 2, 4, 8"),
        ({"max_model_len": 4096}, "max_model_len=4096: .* 1024"),
        ({"num_blocks": 4}, "4 blocks of 16 tokens.*1024 needs 64"),
        ({"gpu_memory_utilization": 90}, "for a figure in bytes use kv_cache_memory_bytes"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"quantization": "awq"}, r"quantization='awq': one of \('int8', 'w4'\), or None"),
        ({"kv_cache_dtype": "fp4"}, r"kv_cache_dtype='fp4': one of \('auto', 'int8', 'fp8'\)"),
        ({"quantization": "int8", "device": "cuda"}, "quantization='int8': only .* CPUs .*='cpu'"),
        ({"quantization": "w4", "device": "cuda"}, "quantization='w4': only .* CPUs .*='cpu'"),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, "kv_cache_dtype='int8': only .* for CPUs"),
        ({"kv_cache_dtype": "fp8", "device": "cpu"}, "kv_cache_dtype='fp8': only .* for GPUs"),
        ({"tensor_parallel_size": "2"}, "tensor_parallel_size='2': must be a whole number"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size=True: must be a whole number"),
        ({"max_model_len": "8k"}, "max_model_len='8k': must be a whole number, or None"),
        ({"gpu_memory_utilization": "half"}, "='half': must be a number, or None"),
        ({"enforce_eager": "no"}, "enforce_eager='no': must be True or False"),
        ({"speculation": 1}, "speculation=1: must be True or False, or None"),
        ({"kv_disk_dir": 5}, "kv_disk_dir=5: must be a path, or None"),
        ({"seed": "3"}, "seed='3': must be a whole number"),
        ({"model": 5}, "model=5: must be a directory, a GGUF file or ORG/NAME"),
        ({"model": ""}, "model='': must be a directory, a GGUF file or ORG/NAME"),
    ],
)
def test_settings_that_cannot_work_say_what_would(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": demo_model.PATH, **settings})


@pytest.mark.parametrize("dtype", ["float", torch.float32, "torch.float32"])
def test_values_of_vllm_mean_the_same(dtype: Any) -> None:
    with LLM(demo_model.PATH, dtype=dtype, model_impl="vllm", num_blocks=64) as made:  # type: ignore[arg-type]
        assert (made.config.dtype, made.config.model_impl) == ("float32", "quire")


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    for file in demo_model.PATH.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        LLM(tmp_path)
    weights = (demo_model.PATH / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(tmp_path)


def test_the_public_surface_is_this() -> None:
    assert sorted(llm.__all__) == [
        *("CompletionOutput", "EmbeddingRequestOutput", "LLM", "LoRARequest", "Logprob"),
        *("RequestOutput", "SamplingParams", "ScoringRequestOutput", "StructuredOutputsParams"),
    ]
    assert list(inspect.signature(LLM.__init__).parameters)[1:] == [
        "model",
        "revision",
        "model_impl",
        "tensor_parallel_size",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "seed",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "num_blocks",
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "device",
        "enforce_eager",
        "deterministic",
        "num_threads",
        "async_scheduling",
        "speculation",
        "scheduling_policy",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_cpu_loras",
        "kv_offloading_size",
        "kv_disk_dir",
        "kv_disk_size",
    ]


def test_a_template_that_takes_too_much_memory_is_ended(
    demo: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "{% set ns = namespace(x='xxxx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    )
    doubling = ChatTemplate(source + "{% endfor %}{{ ns.x }}", special_tokens={})
    monkeypatch.setattr(demo.get_tokenizer(), "_template", doubling)
    monkeypatch.setattr(demo, "_templates", None)
    with pytest.raises(InvalidRequest, match="the chat template refuses these messages"):
        demo.chat([{"role": "user", "content": "?"}], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="messages: are no JSON"):
        demo.chat([{"role": "user", "content": cast(str, {1j})}], GREEDY, use_tqdm=False)


def test_tools_reach_the_chat_template(demo: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    source = "{{ messages[0].content }}{{ tools[0].function.name }}"
    template = ChatTemplate(source, special_tokens={})
    monkeypatch.setattr(demo.get_tokenizer(), "_template", template)
    monkeypatch.setattr(demo, "_templates", None)
    (output,) = demo.chat(
        [{"role": "user", "content": "the "}], SamplingParams(max_tokens=1), tools=[tool]
    )
    assert list(output.prompt_token_ids) == demo.get_tokenizer().encode(
        "the weather", add_special_tokens=False
    )


@pytest.mark.parametrize("prompt", ["Text", {"prompt": "Text"}])
def test_a_text_is_embedded_alike_in_a_mapping(
    prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm: Any = LLM.__new__(LLM)
    llm._use = EmbeddingUse(is_lower=True)
    assert llm._as_written(0, prompt, None) == {"prompt": "text"}
    llm._use = EmbeddingUse(is_chat=True)
    monkeypatch.setattr(LLM, "_rendered", lambda llm, chat, options: [len(chat[0]["content"])])
    salted = {"prompt": prompt, "cache_salt": "s"} if isinstance(prompt, str) else prompt
    assert llm._as_written(0, salted, None)["prompt_token_ids"] == [4]
    assert llm._as_written(0, {"prompt_token_ids": [1]}, None) == {"prompt_token_ids": [1]}
