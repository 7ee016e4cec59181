"""Train the demo model on the prepared text and export it for Hugging Face transformers.

Run from the root of the repository: python -m tools.demo_model.train --minutes 45
The learning rate follows the share of the time budget that has passed, not a step count, so
a slow or a busy machine ends with a well annealed model too, only after fewer steps.
"""

import argparse
import itertools
import json
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tools.demo_model import prepare
from tools.demo_model.chats import SYSTEM_SENTENCES, Encoder, SystemPrompts
from tools.demo_model.helper import ComputeGradient, Helper
from tools.demo_model.packing import IGNORED, Batch, Mixture, fixed_batches
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 20
WARMUP = 0.02  # Shares of the budget.
DECAY_FROM = 0.55
LONG_FROM = 0.75  # From here on some sequences have 1,024 tokens.
MATRIX_RATE = 4e-3
OTHER_RATE = 4e-3
EVALUATE_SECONDS = 240.0
EXPORT_SECONDS = 180.0


def model_config() -> LlamaConfig:
    """Small, but with grouped-query attention and sizes that two or four devices can share."""
    return LlamaConfig(
        vocab_size=prepare.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=prepare.MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def rate(done: float) -> float:
    """The factor of the learning rates after a share `done` of the budget."""
    if done < WARMUP:
        return done / WARMUP
    if done < DECAY_FROM:
        return 1.0
    return max(0.02, 1 - (done - DECAY_FROM) / (1 - DECAY_FROM))


def hand_share(done: float) -> float:
    """The share of hand-written chats: first some, to be learned by heart, at the end more."""
    return 0.35 + 0.2 * min(1.0, max(0.0, (done - 0.75) / 0.1))


def loss_sum(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The summed cross-entropy. Logits are computed only where a token counts."""
    hidden = model.model(
        input_ids=batch.ids_BT,
        position_ids=batch.positions_BT,
        attention_mask=batch.mask_B1TT,
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden.flatten(0, 1)[batch.rows_N])
    return F.cross_entropy(logits.float(), batch.targets_N, ignore_index=IGNORED, reduction="sum")


@torch.no_grad()
def evaluate(model: Any, batches: list[Batch]) -> float:
    """The mean loss per counted token."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        total = sum(float(loss_sum(model, batch)) for batch in batches)
    model.train()
    return total / sum(batch.num_targets for batch in batches)


def held_out(data: dict[str, Any], encoder: Encoder, system: str) -> dict[str, list[Batch]]:
    """Evaluation text that the training never sees."""
    words = [encoder.chat([tuple(word["turns"][0])]) for word in data["held_out_words"]]
    questions = [encoder.chat([(q, a)]) for q, a in data["held_out_questions"]]
    prose = [encoder.prose(paragraph) for paragraph in data["held_out_prose"]]
    alone, end = encoder.prefix(None), encoder.end
    return {
        "new_words": fixed_batches(words, alone, False, end),
        "new_phrasings": fixed_batches(questions, encoder.prefix(system), True, end),
        "new_prose": fixed_batches(prose, alone, False, end),
    }


def export(model: Any, folder: Path, log: dict[str, Any]) -> None:
    """Write a complete checkpoint folder in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    copy: Any = LlamaForCausalLM(model.config)
    copy.to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config.max_new_tokens = 128
    copy.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = 10000.0  # Older readers look here.
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "training_log.json").write_text(json.dumps(log, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "system_prompt.txt"):
        if folder != prepare.PACKAGE:
            shutil.copy(prepare.PACKAGE / name, folder / name)


def publish(model: LlamaForCausalLM, link: Path, step: int, log: dict[str, Any]) -> None:
    """Export next to `link`, then point `link` there in one atomic step."""
    previous = link.resolve() if link.is_symlink() else None
    target = link.with_name(f"{link.name}.{step}")
    export(model, target, log)
    fresh = link.with_name(f"{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name)
    os.replace(fresh, link)
    if previous is not None and previous != target:
        shutil.rmtree(previous)


def load() -> tuple[dict[str, Any], Encoder, str]:
    """The prepared text, the encoder and the packaged system prompt."""
    data = json.loads((prepare.BUILD / "data.json").read_text())
    system = (prepare.PACKAGE / "system_prompt.txt").read_text().strip()
    encoder = Encoder(Tokenizer.from_file(str(prepare.PACKAGE / "tokenizer.json")))
    return data, encoder, system


def make_compute(seed: int) -> tuple[LlamaForCausalLM, ComputeGradient]:
    """A model, and the function that computes the gradient of one batch."""
    data, encoder, system = load()
    systems = SystemPrompts(system, SYSTEM_SENTENCES.read_text().splitlines())
    mixture = Mixture(data, encoder, systems, seed)
    turns = itertools.count()
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(model_config())

    def compute(model: Any, done: float) -> float:
        turn = next(turns)
        share = hand_share(done)
        # Chats behind a system prompt cost more for what they teach, so they come later.
        if turn % (4 if done < 0.6 else 2) > 0:
            batch = mixture.plain_batch(6, 256, share * 0.6)
        elif done > LONG_FROM and turn % 8 == 0:
            batch = mixture.system_batch(2, 1024, share)
        else:
            batch = mixture.system_batch(3, 512, share)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_sum(model, batch) / batch.num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    return model, compute


def main() -> None:
    """Train for the given time, then write the weights and the log into the output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--checkpoints", type=Path, default=prepare.BUILD / "checkpoint")
    parser.add_argument("--output", type=Path, default=prepare.PACKAGE)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, compute = make_compute(SEED)
    evaluations = held_out(*load())
    curve: list[dict[str, float]] = []
    log: dict[str, Any] = {
        "seed": SEED,
        "parameters": sum(p.numel() for p in model.parameters()),
        "budget_minutes": arguments.minutes,
        "machine": f"2 processes of 1 thread, {platform.machine()} CPU, bf16 autocast",
        "torch": torch.__version__,
        "elapsed_minutes": 0.0,
        "curve": curve,
    }
    print(f"{log['parameters']} parameters", flush=True)
    step = num_batches = 0
    if arguments.resume:
        saved = json.loads((arguments.checkpoints / "training_log.json").read_text())
        checkpoint = LlamaForCausalLM.from_pretrained(arguments.checkpoints, dtype=torch.float32)
        model.load_state_dict(checkpoint.state_dict())
        curve += saved["curve"]
        log["elapsed_minutes"] = saved["elapsed_minutes"]
        step, num_batches = saved["step"], saved["batches"]
    helper = Helper(make_compute, SEED + 1 + step, model)

    parameters = dict(model.named_parameters())
    matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in parameters.items() if p.ndim != 2 or "embed" in n]
    muon: Any = torch.optim.Muon(
        matrices, lr=MATRIX_RATE, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    resumed = time.monotonic()
    start = resumed - log["elapsed_minutes"] * 60
    budget = arguments.minutes * 60
    last_evaluation = last_export = resumed - start
    recent: list[float] = []

    def record(elapsed: float) -> None:
        entry = {"step": step, "minutes": round(elapsed / 60, 2), "batches": num_batches}
        entry["train"] = round(sum(recent[-50:]) / len(recent[-50:]), 4)
        for name, chosen in evaluations.items():
            entry[name] = round(evaluate(model, chosen), 4)
        curve.append(entry)
        log.update(elapsed_minutes=elapsed / 60, step=step, batches=num_batches)
        print(json.dumps(entry), flush=True)

    while (elapsed := time.monotonic() - start) < budget:
        done = elapsed / budget
        # Right after a resumption the optimizers know nothing yet.
        factor = rate(done) * min(1.0, (elapsed - resumed + start + 1) / 40)
        for optimizer, base in ((muon, MATRIX_RATE), (adam, OTHER_RATE)):
            optimizer.param_groups[0]["lr"] = base * factor
        recent.append(compute(model, done))
        num_batches += 1 + helper.collect(model, done)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 25 == 0:
            mean = sum(recent[-25:]) / len(recent[-25:])
            print(f"step {step} {elapsed:.0f}s {num_batches} batches {mean:.3f}", flush=True)
        if elapsed - last_evaluation > EVALUATE_SECONDS or step == 1:
            last_evaluation = elapsed
            record(elapsed)
        if elapsed - last_export > EXPORT_SECONDS:
            last_export = elapsed
            log.update(elapsed_minutes=elapsed / 60, step=step, batches=num_batches)
            publish(model, arguments.checkpoints, step, log)

    helper.stop()
    record(budget)
    publish(model, arguments.checkpoints, step, log)
    export(model, arguments.output, log)


if __name__ == "__main__":
    main()
