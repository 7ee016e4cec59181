"""vLLM's arguments that Quire lacks are refused with a reason, unknown ones as in Python."""

import inspect
import pickle
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, demo_model
from quire.worker.request.errors import UnknownArgument
from quire.worker.request.vllm_names import REFUSED

OFFLINE = inspect.signature(LLM).parameters
# Fields of vllm.SamplingParams in release 0.33 and in some before it.
FIELDS = (
    *("n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "logits_processors"),
    *("include_stop_str_in_output", "truncate_prompt_tokens", "output_kind", "skip_clone"),
    *("structured_outputs", "guided_decoding", "logit_bias", "allowed_token_ids", "extra_args"),
    *("bad_words", "skip_reading_prefix_cache", "flat_logprobs", "logprob_token_ids"),
    *("thinking_token_budget", "repetition_detection", "use_beam_search"),
)


def given(name: str) -> dict[str, Any]:
    return {name: True}


@pytest.mark.parametrize(
    "name", [flag[2:].replace("-", "_") for flag in REFUSED if flag.startswith("--")]
)
def test_an_argument_is_refused_with_the_sentence_of_its_flag(name: str) -> None:
    assert name not in OFFLINE
    with pytest.raises(TypeError, match=rf"^LLM\({name}=…\): vLLM's {name} is not served: .{{12}}"):
        LLM(model="m", **given(name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("enable_chunked_prefill", "can be left out: prompts are always computed in chunks"),
        ("data_parallel_size", "it is --num-groups of `quire serve`"),
        ("swap_space", "is not served: kv_offloading_size keeps"),
        ("max_num_seq", "no such argument; is max_num_seqs meant?"),
        ("colour", "no such argument; there are model, revision, "),
    ],
)
def test_other_arguments_are_told_with_what_to_do(name: str, message: str) -> None:
    with pytest.raises(UnknownArgument, match=message):
        LLM(model="m", **given(name))


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_of_vllms_sampling_is_there_or_refused_with_a_sentence(name: str) -> None:
    if name in inspect.signature(SamplingParams).parameters:
        return
    with pytest.raises(
        TypeError, match=rf"^SamplingParams\({name}=…\): vLLM's {name} is not served"
    ):
        SamplingParams(**given(name))


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (StructuredOutputsParams, "disable_fallback", "llguidance is the one backend"),
        (StructuredOutputsParams, "schema", "there are json, regex, choice"),
        (LoRARequest, "lora_local_path", "spell it lora_path"),
    ],
)
def test_other_classes_explain_theirs(kind: type[Any], name: str, message: str) -> None:
    with pytest.raises(UnknownArgument, match=message):
        kind(**given(name))


def test_a_misspelt_parameter_is_asked_about_and_the_class_is_what_it_was() -> None:
    with pytest.raises(UnknownArgument, match="is temperature meant"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # type: ignore[call-arg]
    params = SamplingParams(temperature=0.5, stop="a")
    assert pickle.loads(pickle.dumps(params)) == params
    assert list(OFFLINE)[:2] == ["model", "revision"]


def test_no_seed_is_the_first_one() -> None:
    with LLM(demo_model.PATH, seed=None, kv_cache_memory_bytes=2**24) as llm:
        assert llm.config.seed == 0
