"""Compares random folders of sentence-transformers to sentence-transformers itself.

    python -m tools.sentence_folders [--folders N] [--seed N] [--show]

Each folder is drawn and saved by the installed version: encoders and decoders, poolings, modules
behind them, activations, limits, cross-encoders of each kind, and settings that change a result.
Texts are longer and shorter than the limits. Each folder must give the same vectors or scores, or
be refused by name. The table counts the outcomes of each kind of folder.
"""

import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from bench.report import command, markdown

from quire.llm import LLM
from quire.worker.model.sentence_folder import read_scoring, read_use
from quire.worker.request.errors import CheckpointError, InvalidRequest
from quire.worker.request.scoring import LogitScore

NUM_WORDS = 300
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
SMALL: dict[str, Any] = {
    **{"vocab_size": NUM_WORDS + len(SPECIAL), "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 130},
}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
MODERN = {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", SMALL),
    "roberta": ("Roberta", SMALL | {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", SMALL | {"type_vocab_size": 1}),
    "data2vec": ("Data2VecText", SMALL | {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", SMALL | DISTIL),
    "modernbert": ("ModernBert", SMALL | MODERN),
}
DECODER = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
TEMPLATE = """\
{%- for role in ("system", "query", "document", "user") -%}
{%- for message in messages if message.role == role -%}
w{{ loop.index }} {{ message.content }} w9{{ " " }}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}w10{% endif -%}"""
POOLINGS = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ACTIVATIONS = ["Tanh", "Identity", "ReLU", "GELU", "SiLU", "Sigmoid", "ELU"]
LENGTHS = (1, 5, 40, 90, 200)


def main() -> None:
    parser = command("tools.sentence_folders", __doc__)
    parser.add_argument("--folders", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print each folder that is refused")
    options = parser.parse_args()
    quiet()
    counts: dict[str, Counter[str]] = {}
    for number in range(options.folders):
        seed = options.seed + number
        kind = [*KINDS][number % len(KINDS)]
        outcome, what = compare(kind, seed)
        counts.setdefault(kind, Counter())[outcome] += 1
        if outcome == "wrong" or options.show:
            print(f"{kind}, --seed {seed}: {outcome}: {what}", file=sys.stderr)
    columns = ["folders", "equal", "refused", "wrong"]
    rows = [
        [kind, str(found.total()), *(str(found[each]) for each in columns[1:])]
        for kind, found in counts.items()
    ]
    print(markdown(["kind", *columns], rows))
    sys.exit(any(found["wrong"] for found in counts.values()))


def quiet() -> None:
    loud: Any = transformers.utils.logging
    loud.set_verbosity_error()
    loud.disable_progress_bar()
    warnings.simplefilter("ignore")


def compare(kind: str, seed: int) -> tuple[str, str]:
    """The outcome for one folder: "equal", "refused" or "wrong", and what was seen."""
    draw = random.Random(f"{kind} {seed}")
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        KINDS[kind](draw, Path(scratch) / "base", folder)
        texts = [words(draw, length) for length in LENGTHS]
        try:
            with LLM(folder, device="cpu", num_threads=1, num_blocks=64) as llm:
                ours = values(llm, texts)
        except (CheckpointError, InvalidRequest) as error:
            return "refused", str(error).removeprefix(str(folder))
        theirs = truth(folder, texts)[: len(ours)]
        if ours.shape != theirs.shape:
            return "wrong", f"shapes {ours.shape} and {theirs.shape}"
        apart = float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))
        return "equal" if apart < 1e-5 else "wrong", f"{apart:.1e} apart"


def values(llm: LLM, texts: list[str]) -> Any:
    """Quire's embeddings, or scores of the first text with the others."""
    scoring = read_scoring(llm.config.model)
    if scoring is not None:
        cut = None if isinstance(scoring, LogitScore) else -1
        scored = llm.score(texts[1], texts[:3], truncate_prompt_tokens=cut, use_tqdm=False)
        return np.array([each.outputs.score for each in scored])
    is_chat = read_use(llm.config.model).is_chat
    texts = texts[:3] if is_chat else texts  # What a template renders is not cut.
    made = llm.embed(texts, truncate_prompt_tokens=None if is_chat else -1, use_tqdm=False)
    return np.array([each.outputs.embedding for each in made])


def truth(folder: Path, texts: list[str]) -> Any:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    settings = (folder / "config_sentence_transformers.json").read_text()
    if "CrossEncoder" in settings or not (folder / "modules.json").is_file():
        model = CrossEncoder(str(folder), device="cpu")
        pairs = [(texts[1], each) for each in texts[:3]]
        return np.array([np.ravel(model.predict([pair]))[0] for pair in pairs])
    model = SentenceTransformer(str(folder), device="cpu")
    return np.stack([model.encode([text])[0] for text in texts])


def words(draw: random.Random, length: int) -> str:
    return " ".join(f"w{draw.randrange(NUM_WORDS)}" for _ in range(length))


def save_base(draw: random.Random, folder: Path, name: str, values: Any, suffix: str) -> None:
    """Saves a random model of transformers with a tokenizer of words."""
    template = values.pop("chat", None)
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}{suffix}")(config).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter) * 0.1
        parameter.data = parameter.data * 3 if parameter.dim() > 1 else parameter.data + noise
    model.save_pretrained(folder)
    ids = {word: n for n, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(NUM_WORDS))])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(each, ids[each]) for each in SPECIAL[1:3]],
    )
    has_types = getattr(config, "type_vocab_size", 1) > 1
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    fast: Any = transformers.PreTrainedTokenizerFast
    # Without a limit, the library fails at texts too long for positions behind a padding token's.
    is_limited = values.get("type_vocab_size") == 1 or draw.random() < 0.8
    limits = {"model_max_length": draw.choice([64, 128])} if is_limited else {}
    tokenizer = fast(
        tokenizer_object=backend,
        **{"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", **limits},
        model_input_names=inputs if has_types else inputs[::2],
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def encoder(draw: random.Random, folder: Path, suffix: str = "Model", **more: Any) -> None:
    name, values = ENCODERS[draw.choice([*ENCODERS])]
    save_base(draw, folder, name, values | more, suffix)


def transformer(draw: random.Random, base: Path, **arguments: Any) -> Any:
    from sentence_transformers.models import Transformer

    if draw.random() < 0.3:
        arguments["max_seq_length"] = draw.choice([16, 64, 100])
    return Transformer(str(base), **arguments)


def tail(draw: random.Random, size: int) -> list[Any]:
    """Random modules behind a Pooling of ``size`` channels."""
    from sentence_transformers.models import Dense, Dropout, LayerNorm, Normalize

    modules: list[Any] = []
    for _ in range(draw.randrange(4)):
        match draw.choice(["Dense", "Dense", "LayerNorm", "Normalize", "Dropout"]):
            case "Dense":
                size_out = draw.choice([size, 24, 48])
                activation = getattr(torch.nn, draw.choice(ACTIVATIONS))()
                residual = {"use_residual": True} if draw.random() < 0.3 else {}
                bias = draw.random() < 0.7
                try:
                    made = Dense(size, size_out, bias, activation, **residual)
                except TypeError:  # Older versions have no residual.
                    made = Dense(size, size_out, bias, activation)
                modules.append(made)
                size = size_out
            case "LayerNorm":
                made = LayerNorm(size)
                made.norm.weight.data += torch.randn(size) * 0.3
                made.norm.bias.data += torch.randn(size) * 0.3
                modules.append(made)
            case "Normalize":
                modules.append(Normalize())
            case "Dropout":
                modules.append(Dropout(0.5))
    return modules


def pooling(draw: random.Random, size: int) -> Any:
    from sentence_transformers.models import Pooling

    modes = draw.sample(POOLINGS, 2 if draw.random() < 0.3 else 1)
    flag = {
        "cls": "cls_token",
        "lasttoken": "lasttoken",
        "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    }
    chosen = {f"pooling_mode_{flag.get(each, f'{each}_tokens')}": True for each in modes}
    chosen.setdefault("pooling_mode_mean_tokens", False)
    more = {"include_prompt": False} if draw.random() < 0.1 else {}
    return Pooling(size, **chosen, **more)


def save_embeddings(draw: random.Random, modules: list[Any], folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    more: dict[str, Any] = {"truncate_dim": 10} if draw.random() < 0.2 else {}
    if renders_chats(modules[0]) and draw.random() < 0.4:
        more |= {"prompts": {"q": "w3"}, "default_prompt_name": "q"}
    SentenceTransformer(modules=modules, device="cpu", **more).save_pretrained(str(folder))


def renders_chats(module: Any) -> bool:
    """Whether a Transformer renders texts by its chat template."""
    return "message" in getattr(module, "modality_config", {})


def of_encoder(draw: random.Random, base: Path, folder: Path) -> None:
    encoder(draw, base)
    pooled = pooling(draw, 32)
    modules = [transformer(draw, base), pooled, *tail(draw, pooled.pooling_output_dimension)]
    save_embeddings(draw, modules, folder)
    if draw.random() < 0.3:
        move_transformer(folder)


def move_transformer(folder: Path) -> None:
    """Moves the Transformer's files into a folder of their own, as older versions saved them."""
    inner = folder / "0_Transformer"
    inner.mkdir()
    kept = ("modules.json", "config_sentence_transformers.json", "README.md")
    for file in folder.iterdir():
        if file.is_file() and file.name not in kept:
            file.rename(inner / file.name)
    listed = folder / "modules.json"
    listed.write_text(listed.read_text().replace('"path": ""', '"path": "0_Transformer"', 1))


def of_decoder(draw: random.Random, base: Path, folder: Path) -> None:
    from sentence_transformers.models import Normalize

    chat = {"chat": TEMPLATE} if draw.random() < 0.3 else {}
    save_base(draw, base, "Qwen3", DECODER | chat, "Model")
    modules = [transformer(draw, base), pooling(draw, 32), Normalize()]
    save_embeddings(draw, modules, folder)


def of_classifier(draw: random.Random, base: Path, folder: Path) -> None:
    from sentence_transformers import CrossEncoder

    encoder(draw, base, "ForSequenceClassification", num_labels=1)
    function = draw.choice([None, "Sigmoid", "Identity", "Tanh"])
    arguments = {} if function is None else {"activation_fn": getattr(torch.nn, function)()}
    if draw.random() < 0.3:
        arguments["max_length"] = draw.choice([20, 64])
    if draw.random() < 0.2:
        arguments |= {"prompts": {"q": "w1 w2 "}, "default_prompt_name": "q"}
    CrossEncoder(str(base), device="cpu", **arguments).save_pretrained(str(folder))


def of_dense_scores(draw: random.Random, base: Path, folder: Path) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.models import Dense

    encoder(draw, base)
    pooled = pooling(draw, 32)
    size = pooled.pooling_output_dimension
    behind = tail(draw, size)
    for module in behind:
        size = getattr(module, "out_features", size)
    head = Dense(size, 1, activation_function=torch.nn.Identity(), module_output_name="scores")
    modules = [transformer(draw, base), pooled, *behind, head]
    CrossEncoder(modules=modules, device="cpu").save_pretrained(str(folder))


def of_logits(draw: random.Random, base: Path, folder: Path) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore

    save_base(draw, base, "Qwen3", DECODER | {"chat": TEMPLATE}, "ForCausalLM")
    asked = {"chat_template": {"add_generation_prompt": True}} if draw.random() < 0.5 else {}
    first = transformer(draw, base, transformer_task="text-generation", processing_kwargs=asked)
    false = None if draw.random() < 0.1 else 8
    function = getattr(torch.nn, draw.choice(["Sigmoid", "Identity", "Softplus"]))()
    prompt = {"prompts": {"q": "w3"}, "default_prompt_name": "q"} if draw.random() < 0.4 else {}
    modules = [first, LogitScore(7, false)]
    made = CrossEncoder(modules=modules, device="cpu", activation_fn=function, **prompt)
    made.save_pretrained(str(folder))


def of_sparse(draw: random.Random, base: Path, folder: Path) -> None:
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.models import MLMTransformer, SpladePooling

    save_base(draw, base, "Bert", SMALL, "ForMaskedLM")
    modules = [MLMTransformer(str(base)), SpladePooling("max")]
    SparseEncoder(modules=modules, device="cpu").save_pretrained(str(folder))


KINDS: dict[str, Any] = {
    "encoder": of_encoder,
    "decoder": of_decoder,
    "classifier": of_classifier,
    "Dense that scores": of_dense_scores,
    "LogitScore": of_logits,
    "sparse": of_sparse,
}


if __name__ == "__main__":
    main()
