"""Reads the settings of a sentence-transformers folder: those of the model, and those of its
Transformer.

Every field that may change a result is used or refused by name, so that a folder with fields of a
later version is refused too. Does not import torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from quire.worker.request.scoring import Similarity
from quire.worker.weights.checkpoint import read_json
from quire.worker.weights.fields import Fields
from quire.worker.weights.tokenizer_config import CONFIG_FILE, read_config

MODEL_SETTINGS = "config_sentence_transformers.json"
TRANSFORMER_SETTINGS = (
    "sentence_bert_config.json",
    *(
        f"sentence_{name}_config.json"
        for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
"""The first of these files that is there counts."""
ModelType = Literal["SentenceTransformer", "CrossEncoder"]
Task = Literal["feature-extraction", "sequence-classification", "text-generation"]

_OUTPUTS: dict[Task, tuple[str, str]] = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
"""The output of transformers that each task reads, and its name for the modules that follow."""
_MANY = 1 << 24
"""A tokenizer's limit from here on means none: transformers writes 10^30."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Settings of the whole model."""

    model_type: ModelType = "SentenceTransformer"
    activation: str | None = None
    """The dotted name of the function of a pair's logit."""
    default_prompt: str = ""
    """The prompt that sentence-transformers uses if its caller names none."""
    similarity: Similarity = "cosine"
    """How two embeddings are compared."""
    num_kept: int | None = None
    """How many numbers of an embedding are kept; ``None`` keeps all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSettings:
    """Settings of the Transformer, the first module."""

    is_chat: bool
    """Whether the chat template renders texts."""
    add_generation_prompt: bool = False
    """Whether the chat template adds its generation prompt."""
    is_lower: bool = False
    """Whether texts are written in lower case before they are tokenized."""


def read_model_settings(path: Path) -> ModelSettings:
    """The settings of the folder ``path``; the defaults if it has none.

    Raises:
        CheckpointError: A setting is not supported.
    """
    file = path / MODEL_SETTINGS
    if not file.is_file():
        return ModelSettings()
    config = Fields(read_json(file), file)
    config.only(
        *("__version__", "requirements", "model_type", "activation_fn", "similarity_fn_name"),
        *("prompts", "default_prompt_name", "truncate_dim", "keep_in_fp32_modules"),
    )
    types: dict[str, ModelType] = {each: each for each in ("SentenceTransformer", "CrossEncoder")}
    prompts, name = config.section("prompts").raw, config.raw.get("default_prompt_name")
    prompt = "" if name is None else prompts.get(name)
    if not isinstance(prompt, str):
        raise config.wrong("default_prompt_name", name, "the name of a text in prompts")
    if config.raw.get("keep_in_fp32_modules"):
        raise config.refused("keep_in_fp32_modules", config.raw["keep_in_fp32_modules"])
    activation = config.raw.get("activation_fn")
    similarities: dict[str, Similarity] = {each: each for each in get_args(Similarity)}
    similarity: Similarity = "cosine"
    if config.raw.get("similarity_fn_name") is not None:
        similarity = config.choice("similarity_fn_name", similarities, default=similarity)
    has_cut = config.raw.get("truncate_dim") is not None
    return ModelSettings(
        model_type=config.choice("model_type", types, default="SentenceTransformer"),
        activation=None if activation is None else str(activation),
        default_prompt=prompt,
        similarity=similarity,
        num_kept=config.count("truncate_dim") if has_cut else None,
    )


def read_transformer_settings(folder: Path, task: Task) -> TransformerSettings:
    """The settings of the Transformer in ``folder``, which must be for ``task``.

    Raises:
        CheckpointError: A setting is not supported.
    """
    config = _settings(folder)
    config.only(
        *("max_seq_length", "do_lower_case", "transformer_task", "modality_config"),
        *("module_output_name", "processing_kwargs", "unpad_inputs"),
        *("tokenizer_args", "processor_kwargs", "model_args", "model_kwargs"),
        *("config_args", "config_kwargs"),
    )
    output, name = _OUTPUTS[task]
    config.choice("transformer_task", {task: task}, default="feature-extraction")
    config.choice("module_output_name", {name: name}, default=name)
    for arguments in ("model_args", "model_kwargs", "config_args", "config_kwargs"):
        config.section(arguments).only("trust_remote_code", "attn_implementation")
    _tokenizer_arguments(config).only(
        "trust_remote_code", "model_max_length", "padding_side", "use_fast"
    )
    modality = config.section("modality_config")
    is_chat = "message" in modality.raw
    is_lower = config.flag("do_lower_case")
    if is_lower and (is_chat or task != "feature-extraction"):
        raise config.refused("do_lower_case", True)
    used = modality.section("message" if is_chat else "text")
    used.choice("method", {"forward": ""}, default="forward")
    used.choice("method_output_name", {output: ""}, default=output)
    if is_chat:
        used.choice("format", {"flat": ""}, default="")
    processing = config.section("processing_kwargs")
    processing.only(*(["chat_template"] if is_chat else []))
    chat = processing.section("chat_template")
    chat.only("add_generation_prompt", "restore_suffix")  # The latter is about cut texts.
    return TransformerSettings(
        is_chat=is_chat,
        add_generation_prompt=chat.flag("add_generation_prompt"),
        is_lower=is_lower,
    )


def most_tokens(folder: Path) -> int | None:
    """The longest text that sentence-transformers gives to the Transformer in ``folder`` without
    cutting it; ``None`` if only the model sets a limit."""
    settings, tokenizer = _settings(folder), folder / CONFIG_FILE
    limits = [
        (_tokenizer_arguments(settings), "model_max_length"),
        (settings, "max_seq_length"),
        (Fields(read_config(folder), tokenizer), "model_max_length"),
    ]
    for fields, name in limits:
        value = fields.raw.get(name)
        if isinstance(value, int | float) and value >= _MANY:
            return None
        if value is not None:
            return fields.count(name)
    return None


def _settings(folder: Path) -> Fields:
    files = [folder / name for name in TRANSFORMER_SETTINGS]
    file = next((each for each in files if each.is_file()), None)
    return Fields({}, files[0]) if file is None else Fields(read_json(file), file)


def _tokenizer_arguments(config: Fields) -> Fields:
    """The tokenizer's arguments, by their older name if both are there, as sentence-transformers
    takes them."""
    older = config.section("tokenizer_args")
    return older if older.raw else config.section("processor_kwargs")
