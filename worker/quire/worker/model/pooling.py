"""Reads how a sentence-transformers checkpoint makes embeddings of texts, or scores pairs.

Imports neither torch nor NumPy.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from quire.worker.api.errors import CheckpointError
from quire.worker.api.scoring import LogitScore, PairScore, Scoring
from quire.worker.model.checkpoint import read_json
from quire.worker.model.fields import Fields

PoolingKind = Literal["last", "mean", "cls", "classifier"]
Activation = Literal["Identity", "Tanh", "ReLU"]

_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_FLAGS = {"cls_token": "cls", "mean_tokens": "mean", "lasttoken": "lasttoken"}
"""Pooling modes of older files, by the suffix of the field ``pooling_mode_…``."""
_SETTINGS = "sentence_bert_config.json"
_FUNCTION = "sbert_ce_default_activation_function"
CLASSIFIER = "ForSequenceClassification"
"""Suffix of the names of architectures that have a classifier after their encoder."""


@dataclass(frozen=True, slots=True)
class Dense:
    """The description of a dense layer, whose weights are in a file of their own."""

    file: Path
    num_in: int
    num_out: int
    activation: Activation
    digest: str
    """SHA-256 of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pooling:
    """How a text's hidden states are turned into one vector."""

    kind: PoolingKind
    """The last token's state, the mean of all states, the first token's state, or the logits of the
    classifier after the encoder."""
    normalize: bool
    """Whether the final vector is scaled to length 1."""
    dense: tuple[Dense, ...] = ()
    """Dense layers that are applied to the vector in order, before it is normalised."""
    max_tokens: int | None = None
    """The longest text that the model accepts; ``None`` if the checkpoint sets no limit."""


def read_pooling(path: Path, *, is_encoder: bool, has_head: bool) -> Pooling | None:
    """The pooling of the checkpoint in ``path``; ``None`` if it is not an embedding model, which
    has an LM head and no ``modules.json``.

    Without ``modules.json``, an encoder uses the mean, as in sentence-transformers, and a decoder
    the normalised state of the last token, as it was trained.

    Raises:
        CheckpointError: It has modules that are not supported; the message names them.
    """
    file = path / "modules.json"
    if not file.is_file():
        if has_head:
            return None
        return Pooling(kind="mean" if is_encoder else "last", normalize=not is_encoder)
    kind: PoolingKind | None = None
    normalize, dense = False, list[Dense]()
    for number, (name, folder) in enumerate(_modules(file)):
        match name:
            case "LogitScore" if has_head:  # A reranker that generates tokens: see `read_scoring`.
                return None
            case "Transformer" if number == 0:
                pass
            case "Pooling" if number == 1:
                kind = _kind_of(path / folder / "config.json")
            case "Dense" if kind is not None and not normalize:
                dense.append(_find_dense(path / folder))
            case "Normalize" if kind is not None:
                normalize = True
            case _:
                raise CheckpointError(
                    f"{file}: module {number} is {name!r}: a Transformer, a Pooling, Dense layers "
                    "and a Normalize are supported, in this order"
                )
    if kind is None:
        raise CheckpointError(f"{file}: no module is a Pooling")
    return Pooling(
        kind=kind,
        normalize=normalize,
        dense=tuple(dense),
        max_tokens=_max_tokens(path / _SETTINGS),
    )


def _find_dense(folder: Path) -> Dense:
    """The layer in ``folder``. Raises CheckpointError: it is missing or of another kind."""
    settings = folder / "config.json"
    config = Fields(read_json(settings), settings)
    function = config.raw.get("activation_function", "Tanh")
    name = str(function).rpartition(".")[2]
    if name not in get_args(Activation):
        raise config.wrong("activation_function", function, " or ".join(get_args(Activation)))
    file = folder / "model.safetensors"
    if not file.is_file():
        raise CheckpointError(f"{file} is missing: only safetensors files are read")
    return Dense(
        file=file,
        num_in=config.count("in_features"),
        num_out=config.count("out_features"),
        activation=name,  # type: ignore[arg-type]  # one of its arguments
        digest=hashlib.sha256(file.read_bytes()).hexdigest(),
    )


def read_scoring(path: Path) -> Scoring | None:
    """How the checkpoint in ``path`` scores pairs; ``None`` if it does not.

    Raises:
        CheckpointError: It scores by the logit of one token alone, which log-probabilities do not
            determine, or by an unsupported function of the logit.
    """
    if (file := path / "config.json").is_file():
        config = Fields(read_json(file), file)
        if any(name.endswith(CLASSIFIER) for name in config.names("architectures")):
            return _pair_score(config)
    file = path / "modules.json"
    folders = [folder for name, folder in _modules(file) if name == "LogitScore"]
    if not folders:
        return None
    file = path / folders[0] / "config.json"
    config = Fields(read_json(file), file)
    token_ids = [config.token_id(f"{name}_token_id") for name in ("true", "false")]
    if None in token_ids:
        raise config.broken("true_token_id and false_token_id must both be there")
    settings = path / _SETTINGS
    kwargs = {}
    if settings.is_file():
        processing = Fields(read_json(settings), settings).section("processing_kwargs")
        kwargs = processing.section("chat_template").raw
    return LogitScore(
        true_token_id=token_ids[0] or 0,
        false_token_id=token_ids[1] or 0,
        add_generation_prompt=bool(kwargs.get("add_generation_prompt")),
    )


def _pair_score(config: Fields) -> PairScore:
    """The score function that sentence-transformers records in ``config.json``."""
    written = config.raw.get(_FUNCTION) or config.section("sentence_transformers").raw.get(
        "activation_fn", "Sigmoid"
    )
    name = str(written).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise config.broken(f"scores by {written!r} are not supported: Sigmoid or Identity")
    return PairScore(is_logistic=name == "Sigmoid")


def _modules(file: Path) -> Iterator[tuple[str, str]]:
    """The class and the folder of each module; nothing if the file does not exist."""
    if not file.is_file():
        return
    try:
        listed: Any = json.loads(file.read_text(encoding="utf-8"))
        for each in listed:
            yield str(each["type"]).rpartition(".")[2], str(each["path"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{file}: not a list of modules with type and path ({error!r})"
        ) from error


def _kind_of(file: Path) -> PoolingKind:
    config = Fields(read_json(file), file)
    modes = [config.raw["pooling_mode"]] if "pooling_mode" in config.raw else []
    for name in config.raw:
        mode = name.removeprefix("pooling_mode_")
        if mode != name and config.flag(name):
            modes.append(_FLAGS.get(mode, mode))
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise CheckpointError(
            f"{file}: pooling by {modes or 'nothing'} is not supported: one of {', '.join(_KINDS)}"
        )
    return _KINDS[modes[0]]


def _max_tokens(file: Path) -> int | None:
    if not file.is_file():
        return None
    config = Fields(read_json(file), file)
    if config.flag("do_lower_case"):
        raise CheckpointError(f"{file}: do_lower_case=true is not supported")
    if config.raw.get("max_seq_length") is None:
        return None
    return config.count("max_seq_length")
