"""LoRA adapters: tokens and log-probabilities are those of transformers with the adapter merged
into the weights, in any batch; and those of PEFT, where that is installed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests import peft_files
from tests.golden.oracle import MAX_TOKENS, greedy, prompts, save
from transformers import AutoModelForCausalLM

from quire.llm import LLM, LoRARequest, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 40},
    "preempted": {"block_size": 4, "num_blocks": 40, "max_model_len": 160},
    "two ranks": {"tensor_parallel_size": 2},
    "one slot": {"max_loras": 1},
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RANKS: dict[str, Any] = {"rank_pattern": {"q_proj": 4, "down_proj": 16}, "use_rslora": True}


class Case(NamedTuple):
    name: str
    """Names of transformers' classes."""
    fields: dict[str, Any]
    adapter: dict[str, Any] | None = None
    """Options of `peft_files.write` for the first of the two."""


CASES = {
    "llama": Case("Llama", {}, {"targets": peft_files.ATTENTION}),
    "qwen3": Case("Qwen3", {"head_dim": 16}, RANKS | {"alpha_pattern": {"q_proj": 3}}),
    "phi3": Case("Phi3", {"partial_rotary_factor": 0.5}, {"dtype": torch.bfloat16}),
    "glm4": Case("Glm4", {"head_dim": 16}),
    "cohere": Case("Cohere", {"logit_scale": 0.8}, {"rank": 64, "size": 0.1}),
    "starcoder2": Case("Starcoder2", {}),
    "gemma3": Case("Gemma3", {"head_dim": 16, "sliding_window": 24}),
    "qwen2-moe": Case(
        "Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}
    ),
    "glm4-moe": Case(
        "Glm4Moe",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
            **{"head_dim": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        },
    ),
    "mixtral": Case("Mixtral", {"num_local_experts": 4}, {"targets": peft_files.ATTENTION}),
}


class Made(NamedTuple):
    path: Path
    adapters: list[LoRARequest | None]
    tokens: list[list[list[int]]]
    """transformers' tokens for `prompts`, by adapter."""
    logprobs: list[list[list[float]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    kept: dict[str, Made] = {}

    def make(case: str) -> Made:
        if case not in kept:
            path = tmp_path_factory.mktemp("adapters") / case
            save(path / "model", CASES[case].name, CASES[case].fields)
            options = [CASES[case].adapter or {}, {"seed": 7}]
            adapters: list[LoRARequest | None] = [None]
            truths = []
            for number, each in enumerate(options):
                folder = path / f"adapter{number}"
                peft_files.write(folder, _model(path), **({"seed": number} | each))
                adapters.append(LoRARequest(folder.name, number + 1, str(folder)))
            for adapter in adapters:
                model = _model(path)
                if adapter is not None:
                    peft_files.merge(model, Path(adapter.lora_path))
                truths.append([greedy(model, prompt) for prompt in prompts()])
            kept[case] = Made(
                path / "model",
                adapters,
                [[tokens for tokens, _ in each] for each in truths],
                [[logprobs for _, logprobs in each] for each in truths],
            )
        return kept[case]

    return make


@pytest.mark.quick_cells("native-chunked-phi3", "native-one slot-qwen3")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_adapters_beside_each_other_say_what_transformers_says(
    made: Callable[[str], Made], case: str, setting: str
) -> None:
    truth = made(case)
    assert truth.tokens[0] != truth.tokens[1] != truth.tokens[2]
    with _llm(truth.path, **SETTINGS[setting]) as llm:
        for _ in range(2):  # The second time from the prefix cache.
            _check(llm, truth)
        stats = llm.engine.stats()
        assert stats.num_hit_tokens > 0
        assert setting != "preempted" or stats.num_preemptions > 0


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}], ids=["whole", "chunked"])
def test_prompts_are_scored_as_transformers_scores_them(
    made: Callable[[str], Made], options: dict[str, Any]
) -> None:
    truth, prompt = made("qwen3"), prompts()[3]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with _llm(truth.path, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}] * 3,
            params,
            lora_request=truth.adapters,
            use_tqdm=False,
        )
    for adapter, output in zip(truth.adapters, outputs, strict=True):
        model = _model(truth.path.parent)
        if adapter is not None:
            peft_files.merge(model, Path(adapter.lora_path))
        logits = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert output.prompt_logprobs is not None
        ours = [
            step[token].logprob
            for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            if step is not None
        ]
        torch.testing.assert_close(torch.tensor(ours), expected, atol=2e-3, rtol=1e-3)


def _check(llm: LLM, truth: Made) -> None:
    """Runs each prompt with each adapter; requests of one prompt stand side by side."""
    pairs = [
        (prompt, number) for prompt in range(len(prompts())) for number in range(len(truth.tokens))
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompts()[prompt]} for prompt, _ in pairs],
        GREEDY,
        lora_request=[truth.adapters[number] for _, number in pairs],
        use_tqdm=False,
    )
    for (prompt, number), output in zip(pairs, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.token_ids == truth.tokens[number][prompt], (prompt, number)
        assert completion.logprobs is not None
        ours = [
            step[token].logprob
            for step, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        torch.testing.assert_close(
            torch.tensor(ours), torch.tensor(truth.logprobs[number][prompt]), atol=2e-3, rtol=1e-3
        )


def _model(path: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def _llm(path: Path, **settings: Any) -> LLM:
    base: dict[str, Any] = {"device": "cpu", "num_blocks": 128, "num_threads": 1}
    return LLM(path, **(base | {"max_num_seqs": 8, "enable_lora": True} | settings))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # A warning of PEFT's.
@pytest.mark.parametrize("kind", ["plain", "rslora", "velora"])
def test_what_peft_writes_says_what_peft_says(tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    save(tmp_path / "model", "Qwen3", {"head_dim": 16})
    config = peft.LoraConfig(
        r=8,
        lora_alpha=12,
        target_modules=r".*\.(q_proj|v_proj|o_proj|up_proj|down_proj)",
        rank_pattern={"layers.0.self_attn.q_proj": 3, r"layers\.\d+\.mlp.up_proj": 5},
        alpha_pattern={"v_proj": 20, "^model.layers.1.mlp.down_proj": 2},
        use_rslora=kind == "rslora",
        **({"velora_config": peft.VeloraConfig()} if kind == "velora" else {}),
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(_model(tmp_path), config).eval()
    model.save_pretrained(tmp_path / "adapter")
    with _llm(tmp_path / "model") as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts()],
            GREEDY,
            lora_request=LoRARequest("peft", 1, str(tmp_path / "adapter")),
            use_tqdm=False,
        )
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(model, prompt)[0]
