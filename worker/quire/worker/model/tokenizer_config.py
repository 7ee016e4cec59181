"""Reads the tokens and chat templates in ``tokenizer_config.json``, next to ``tokenizer.json``.

As in transformers, tokens that only ``tokenizer_config.json`` lists are added, and those that it
names, such as ``eos_token``, are special tokens.
"""

import json
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.worker.api.errors import CheckpointError
from quire.worker.model.checkpoint import read_json

if TYPE_CHECKING:  # A model's configuration needs no tokenizer.
    import tokenizers

CONFIG_FILE = "tokenizer_config.json"
TEMPLATES_FOLDER = "additional_chat_templates"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``; empty if the file does not exist.

    Raises:
        CheckpointError: It cannot be read.
    """
    file = folder / CONFIG_FILE
    return read_json(file) if file.is_file() else {}


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of named tokens, by names such as ``eos_token``."""
    tokens = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: value for name, value in tokens.items() if isinstance(value, str)}


def chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The checkpoint's chat templates by name; "default" is for chats without tools. Template files
    take precedence over the configuration."""
    settings, found = folder / CONFIG_FILE, config.get("chat_template")
    if found is None:  # Older processors keep it here.
        settings = folder / "chat_template.json"
        found = (read_json(settings) if settings.is_file() else {}).get("chat_template")
    named = found if isinstance(found, list) else [{"name": "default", "template": found}]
    templates = {}
    for entry in named:
        name, source = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if isinstance(name, str) and isinstance(source, str):
            templates[name] = source
        elif found is not None:
            raise CheckpointError(
                f"{settings}: chat_template={reprlib.repr(found)} must "
                "be a Jinja template, or a list of objects with name and template"
            )
    more = sorted((folder / TEMPLATES_FOLDER).glob("*.jinja"))
    for name, file in [("default", folder / "chat_template.jinja"), *((f.stem, f) for f in more)]:
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{file} cannot be read as text: {error}") from error
    return templates


def named_token_id(folder: Path, name: str) -> int | None:
    """The id of the tokenizer's token named ``name``, such as ``eos_token``, if any."""
    config = read_config(folder)
    text = named_tokens(config).get(name)
    if text is None:
        return None
    listed = [token_id for token_id, token in _listed(config) if token["content"] == text]
    file = folder / "tokenizer.json"
    if not listed and file.is_file():  # Larger, and rarely needed.
        listed = [token_id for token, token_id in _vocabulary(file) if token == text]
    return listed[0] if listed else None


def added_tokens(config: Mapping[str, Any]) -> set[str]:
    """The texts of ``added_tokens_decoder``. Raises CheckpointError."""
    return {token["content"] for _, token in _listed(config)}


def vocabulary(folder: Path) -> set[str]:
    """All tokens of the ``tokenizer.json`` in ``folder``; none if there is no such file."""
    file = folder / "tokenizer.json"
    return {token for token, _ in _vocabulary(file)} if file.is_file() else set()


def gives_types(config: Mapping[str, Any]) -> bool:
    """Whether transformers' tokenizer returns token type ids (which of two texts a token is in)."""
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return config.get("tokenizer_class") not in ("PreTrainedTokenizerFast", "TokenizersBackend")


def with_added_tokens(
    backend: "tokenizers.Tokenizer", config: Mapping[str, Any]
) -> "tokenizers.Tokenizer":
    """``backend`` with the tokens of ``config``."""
    import tokenizers

    by_name = named_tokens(config)
    named = {by_name[name] for name in _NAMES if name in by_name}
    there = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = {token["content"]: dict(token) for _, token in _listed(config)}
    for text in filter(None, map(by_name.get, ("bos_token", "eos_token"))):
        if text not in listed and backend.token_to_id(text) is not None:
            listed[text] = {"content": text, "normalized": False}
    for text, token in listed.items():
        token["special"] = bool(token.get("special")) or text in named
    missing = [
        tokenizers.AddedToken(**token) for text, token in listed.items() if text not in there
    ]
    backend.add_tokens(missing)
    special = named | {text for text, token in listed.items() if token["special"]}
    if all(there[text].special for text in special & there.keys()):
        return backend
    # The library does not change the flag of an existing token.
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] or token["content"] in special
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entries of ``added_tokens_decoder``, ordered by id."""
    listed = config.get("added_tokens_decoder") or {}
    try:
        for token_id in sorted(listed, key=int):
            token = listed[token_id]
            flags = {name: bool(token[name]) for name in _FLAGS if name in token}
            yield int(token_id), {"content": str(token["content"]), **flags}
    except (LookupError, TypeError, ValueError):
        raise CheckpointError(
            f"{CONFIG_FILE}: added_tokens_decoder={reprlib.repr(listed)} must be an object with a "
            "token for each id"
        ) from None


def _vocabulary(file: Path) -> list[tuple[str, int]]:
    """All tokens of a ``tokenizer.json``; none if it is invalid, which loading it reports."""
    state = read_json(file)
    try:
        vocabulary = state["model"]["vocab"]
        if not isinstance(vocabulary, dict):  # A list of pieces with their scores.
            vocabulary = {piece: token_id for token_id, (piece, *_) in enumerate(vocabulary)}
        return [(each["content"], each["id"]) for each in state["added_tokens"]] + [
            *vocabulary.items()
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []
