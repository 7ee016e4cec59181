"""The tokenizer's files that trainers save beside an adapter. They are not served: the model's own
are, so an adapter that was trained with others is refused.

Does not import torch.
"""

import re
from pathlib import Path

from quire.worker.request.errors import AdapterError, CheckpointError
from quire.worker.weights import tokenizer_config
from quire.worker.weights.checkpoint import open_file, read_json

FILE_NAMES = ("tokenizer_config.json", "chat_template.jinja", "added_tokens.json")
_MAX_BYTES = 8 << 20
_TRAINING_TAGS = re.compile(r"\{%-? (?:end)?generation -?%\}")
"""Mark an answer's text for the loss; they render nothing."""


def check_texts(folder: Path, model: Path, *, chat_template: str | None = None) -> None:
    """Checks that the tokenizer's files in an adapter's ``folder``, if any, are those of ``model``.

    ``chat_template``: a template to use instead of the model's own.

    Raises:
        AdapterError: The adapter has another chat template, or tokens that the model lacks.
        CheckpointError: A file of the model cannot be read.
    """
    try:
        templates, tokens = _templates(folder), _added_tokens(folder)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    own = chat_template or _templates(model).get("default")
    theirs = templates.get("default")
    # Without a template of the model, chats are refused, and nothing is rendered wrongly.
    if own and theirs and _bare(own) != _bare(theirs):
        raise AdapterError(
            f"{folder}: its chat template is not that of the model, and would not be used: serve "
            "the model with it (--chat-template FILE), or remove it from the adapter's folder"
        )
    if tokens <= _added_tokens(model):
        return
    known = tokenizer_config.vocabulary(model)
    unknown = sorted(tokens - known)
    if known and unknown:
        raise AdapterError(
            f"{folder}: its tokenizer adds {unknown[0]!r}, which is no token of the model; "
            "adapters with tokens of their own are not served"
        )


def _templates(folder: Path) -> dict[str, str]:
    return tokenizer_config.chat_templates(folder, _read_config(folder))


def _added_tokens(folder: Path) -> set[str]:
    file = folder / "added_tokens.json"
    listed = read_json(file, max_bytes=_MAX_BYTES) if file.exists() else {}
    return {*listed, *tokenizer_config.added_tokens(_read_config(folder))}


def _read_config(folder: Path) -> dict[str, object]:
    for name in FILE_NAMES:
        if (folder / name).exists():
            open_file(folder / name, max_bytes=_MAX_BYTES).close()
    return tokenizer_config.read_config(folder)


def _bare(template: str) -> str:
    return _TRAINING_TAGS.sub("", template).strip()
