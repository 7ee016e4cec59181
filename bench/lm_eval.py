"""lm-eval, as it is, against `quire serve`: its log-likelihoods beside those of transformers.

    python -m bench.lm_eval

Installs lm-eval in an environment of its own under the cache folder, serves the demo model in
float32, and has lm-eval score the choices of a few questions over ``/v1/completions``.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench.report import command
from bench.servers import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import demo_model

PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.23.0")
QUESTIONS = (
    ("The sky is blue because air scatters the", " blue part of sunlight", " red part", " bees"),
    ("Bees collect nectar from", " flowers and turn it into honey", " the router", " a worker"),
    ("Prefix caching keeps the", " KV blocks of text", " sky", " bees in a hive"),
    ("Continuous batching lets requests", " join and leave the running batch", " sleep", " turn"),
)
TASK = """task: questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


def main() -> None:
    command("bench.lm_eval", __doc__).parse_args()
    lm_eval = _install(Path.home() / ".cache" / "quire" / "lm-eval")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"question": text, "choices": choices} for text, *choices in QUESTIONS]
        (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "questions.yaml").write_text(TASK.format(file=folder / "questions.jsonl"))
        with serving("--num-groups", "1", "--dtype", "float32") as server:
            told = _run(lm_eval, server.http, folder)
    expected = [_log_likelihoods(text, choices) for text, *choices in QUESTIONS]
    pairs = [
        pair for scores in zip(told, expected, strict=True) for pair in zip(*scores, strict=True)
    ]
    worst = max(abs(a - b) for a, b in pairs)
    for (text, *_), scores in zip(QUESTIONS, told, strict=True):
        print(f"{text} …: {', '.join(f'{score:.4f}' for score in scores)}")
    print(f"largest difference from transformers: {worst:.1e}")


def _install(folder: Path) -> Path:
    if not (folder / "is-whole").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet")
        subprocess.run([*pip, *PACKAGES], check=True)
        (folder / "is-whole").touch()
    return folder / "bin" / "lm_eval"


def _run(lm_eval: Path, url: str, folder: Path) -> list[list[float]]:
    """The log-likelihoods of each question's choices."""
    arguments = {
        "model": demo_model.NAME,
        "base_url": f"{url}/v1/completions",
        "tokenizer": demo_model.PATH,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
    }
    subprocess.run(
        [
            *(lm_eval, "run", "--model", "local-completions", "--tasks", "questions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--include_path", folder, "--log_samples", "--output_path", folder / "out"),
        ],
        check=True,
    )
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
    return [[float(score) for ((score, _),) in row["resps"]] for row in rows]


def _log_likelihoods(text: str, choices: list[str]) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model.PATH)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    scores = []
    for choice in choices:
        first = len(tokenizer(text, add_special_tokens=False).input_ids)
        ids = tokenizer(text + choice, add_special_tokens=False).input_ids
        with torch.no_grad():
            logprobs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        scores.append(sum(float(logprobs_TV[at - 1, ids[at]]) for at in range(first, len(ids))))
    return scores


if __name__ == "__main__":
    main()
