"""Reads a sentence-transformers folder: how it makes embeddings of texts, or scores pairs.

`quire.worker.weights.modules_file` lists its modules. Fields of its files that may change a result
are used, or refused by name. Does not import torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.worker.model.pooling import Cut, Pooling, PoolingMode, Step
from quire.worker.model.sentence_modules import (
    read_dense,
    read_layer_norm,
    read_modes,
    read_normalize,
)
from quire.worker.model.sentence_settings import (
    MODEL_SETTINGS,
    TRANSFORMER_SETTINGS,
    ModelSettings,
    ModelType,
    Task,
    TransformerSettings,
    read_model_settings,
    read_transformer_settings,
)
from quire.worker.request.errors import CheckpointError
from quire.worker.request.scoring import EmbeddingUse, LogitScore, PairScore, Scoring
from quire.worker.weights.checkpoint import read_json
from quire.worker.weights.fields import Fields
from quire.worker.weights.modules_file import MODULES, Module, read_modules

CLASSIFIER = "ForSequenceClassification"
"""Suffix of the names of architectures that have a classifier after their encoder."""

_KNOWN: dict[ModelType, str] = {
    "SentenceTransformer": "Transformer, a Pooling, and Dense, LayerNorm, Dropout and Normalize "
    "behind it",
    "CrossEncoder": "Transformer alone, with a LogitScore, or with a Pooling and a Dense that "
    "makes the score",
}
_FUNCTION = "sbert_ce_default_activation_function"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentenceFolder:
    """What a sentence-transformers folder is for."""

    transformer: Path
    """The folder of the Transformer, with ``config.json``, the weights and the tokenizer."""
    pooling: Pooling | None = None
    """How hidden states become an embedding, or a pair's logit; ``None`` if the model's own head
    makes the score."""
    use: EmbeddingUse = field(default_factory=EmbeddingUse)
    """How texts become prompts, and how embeddings are compared, if it makes embeddings."""
    scoring: Scoring | None = None
    """How pairs are scored; ``None`` if the folder makes embeddings."""


def read_sentence_folder(path: Path) -> SentenceFolder | None:
    """The folder ``path``; ``None`` if it has no ``modules.json``.

    Raises:
        CheckpointError: It has modules or settings that are not supported; the message names them.
    """
    modules = read_modules(path)
    if not modules:
        return None
    settings = read_model_settings(path)
    kinds = [each.kind for each in modules]
    folder, tail = modules[0].folder, modules[1:]
    if kinds[0] != "Transformer":
        raise _unsupported(path, modules[0], settings)
    made = SentenceFolder(transformer=folder)
    scores_pairs = settings.model_type == "CrossEncoder"
    if scores_pairs and kinds[1:] == ["LogitScore"]:
        used = _transformer(folder, "text-generation")
        return replace(made, scoring=_logit_score(path, tail[0].folder, used, settings))
    if scores_pairs and not tail:
        _transformer(folder, "sequence-classification")
        return replace(made, scoring=_pair_score(path, folder, settings))
    used = _transformer(folder, "feature-extraction", takes_chats=not scores_pairs)
    use = EmbeddingUse(
        similarity=settings.similarity,
        is_chat=used.is_chat,
        add_generation_prompt=used.add_generation_prompt,
        prompt=settings.default_prompt if used.is_chat else "",
        is_lower=used.is_lower,
    )
    if scores_pairs and used.is_lower:
        raise CheckpointError(
            f"{folder / TRANSFORMER_SETTINGS[0]}: do_lower_case=True is supported for embeddings "
            "only"
        )
    pooling = _pooling(path, tail, settings, scores_pairs=scores_pairs)
    scoring = _pair_score(path, folder, settings) if scores_pairs else None
    return replace(made, pooling=pooling, use=use, scoring=scoring)


def read_use(path: Path) -> EmbeddingUse:
    """How texts become prompts of the checkpoint in ``path``, and how its embeddings are compared.

    Raises:
        CheckpointError: As `read_sentence_folder`.
    """
    found = read_sentence_folder(path)
    return EmbeddingUse() if found is None else found.use


def read_scoring(path: Path) -> Scoring | None:
    """How the checkpoint in ``path`` scores pairs; ``None`` if it does not.

    Raises:
        CheckpointError: As `read_sentence_folder`, or it scores by an unsupported function.
    """
    if (found := read_sentence_folder(path)) is not None:
        return found.scoring
    file = path / "config.json"
    if file.is_file() and is_classifier(Fields(read_json(file), file)):
        return _pair_score(path, path, ModelSettings())
    return None


def is_classifier(config: Fields) -> bool:
    """Whether the architecture has a classifier after its encoder."""
    return any(name.endswith(CLASSIFIER) for name in config.names("architectures"))


def _transformer(folder: Path, task: Task, *, takes_chats: bool = False) -> TransformerSettings:
    used = read_transformer_settings(folder, task)
    if used.is_chat and task != "text-generation" and not takes_chats:
        raise CheckpointError(
            f"{folder / TRANSFORMER_SETTINGS[0]}: modality_config has 'message': pairs that the "
            "chat template renders are scored by logits only"
        )
    if not used.is_chat and task == "text-generation":
        raise CheckpointError(
            f"{folder / TRANSFORMER_SETTINGS[0]}: modality_config has no 'message': only pairs "
            "that the chat template renders are scored by logits"
        )
    return used


def _pooling(
    path: Path, modules: Sequence[Module], settings: ModelSettings, *, scores_pairs: bool
) -> Pooling:
    """The Pooling and the modules after it."""
    steps: list[Step] = []
    modes: tuple[PoolingMode, ...] = ()
    for module in modules:
        match module.kind:
            case "Pooling" if not modes:
                modes = read_modes(module.folder / "config.json")
            case "Dense" if modes:
                is_last = module is modules[-1]
                steps.append(read_dense(module.folder, is_head=is_last and scores_pairs))
            case "LayerNorm" if modes:
                steps.append(read_layer_norm(module.folder))
            case "Normalize" if modes:
                steps.append(read_normalize(module.folder / "config.json"))
            case "Dropout" if modes:  # Nothing is dropped outside training.
                pass
            case _:
                raise _unsupported(path, module, settings)
    if not modes:
        raise CheckpointError(f"{path / MODULES}: no module is a Pooling")
    if scores_pairs:
        if modules[-1].kind != "Dense":
            raise _unsupported(path, modules[-1], settings)
    elif settings.num_kept is not None:
        steps.append(Cut(settings.num_kept))
    return Pooling(modes=modes, steps=tuple(steps), reads_pairs=scores_pairs)


def _unsupported(path: Path, module: Module, settings: ModelSettings) -> CheckpointError:
    return CheckpointError(
        f"{path / MODULES}: module {module.number} is {module.kind!r}; a {settings.model_type} is "
        f"supported with a {_KNOWN[settings.model_type]}"
    )


def _logit_score(
    path: Path, folder: Path, used: TransformerSettings, settings: ModelSettings
) -> LogitScore:
    file = folder / "config.json"
    config = Fields(read_json(file), file)
    config.only("true_token_id", "false_token_id", "module_input_name")
    config.choice("module_input_name", {"causal_logits": ""}, default="causal_logits")
    true, false = (config.token_id(f"{name}_token_id") for name in ("true", "false"))
    if true is None or false is None:
        # One token's logit is not determined by log-probabilities.
        raise config.broken("true_token_id and false_token_id must both be there")
    return LogitScore(
        true_token_id=true,
        false_token_id=false,
        add_generation_prompt=used.add_generation_prompt,
        is_logistic=_is_logistic(path / MODEL_SETTINGS, settings.activation),
        prompt=settings.default_prompt,
    )


def _pair_score(path: Path, folder: Path, settings: ModelSettings) -> PairScore:
    """The score of a pair's logit, by the function in the model's settings, else by that in
    ``config.json``, where older versions have it."""
    file, function = path / MODEL_SETTINGS, settings.activation
    if function is None:
        file = folder / "config.json"
        config = Fields(read_json(file), file)
        function = config.section("sentence_transformers").raw.get("activation_fn")
        function = function or config.raw.get(_FUNCTION)
    return PairScore(is_logistic=_is_logistic(file, function), prompt=settings.default_prompt)


def _is_logistic(file: Path, function: object) -> bool:
    """Whether a logit's ``function`` is the logistic one, the default, rather than none."""
    name = str(function or "torch.nn.modules.activation.Sigmoid").rpartition(".")[2]
    is_known = function is None or str(function).startswith("torch.nn.")
    if not is_known or name not in ("Sigmoid", "Identity"):
        raise CheckpointError(
            f"{file}: scores by {function!r} are not supported; only torch.nn's Sigmoid and "
            "Identity are"
        )
    return name == "Sigmoid"
