"""Reads the tokens and chat templates in ``tokenizer_config.json``, next to ``tokenizer.json``.

As in transformers, a token that the configuration lists or names is added if it is missing. It is
special if it has a name, such as ``eos_token``, or is one of the extra special tokens. Where
``added_tokens_decoder`` is missing, as in older folders, ``special_tokens_map.json`` and
``added_tokens.json`` are read as well.
"""

import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import read_json

if TYPE_CHECKING:  # A model's configuration needs no tokenizer.
    import tokenizers

CONFIG_FILE = "tokenizer_config.json"
TEMPLATES_FOLDER = "additional_chat_templates"
_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""The names that transformers knows, in the order in which it adds these tokens."""
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
_OWN_NAMES = "model_specific_special_tokens"
_LISTED = "added_tokens_decoder"
_OLD_LISTED = "added_tokens.json"
"""The field of a configuration that holds the contents of the file of this name."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``, with those of older files merged into it; empty if
    the files do not exist.

    Raises:
        CheckpointError: A file cannot be read.
    """
    config = _read(folder / CONFIG_FILE)
    if config.get(_LISTED) is not None:
        return _merged(config, {})
    merged = _merged(config, _read(folder / "special_tokens_map.json"))
    return merged | {_OLD_LISTED: _read(folder / "added_tokens.json")}


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of named tokens, by names such as ``eos_token``."""
    return {name: token["content"] for name, token in _named(config).items()}


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


def vocab_size(folder: Path) -> int | None:
    """The number of token ids of the model in ``folder``; ``None`` if it does not say."""
    config = _read(folder / "config.json")
    part = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (part, config) if isinstance(each, dict)]
    return next((size for size in sizes if type(size) is int), None)


def with_added_tokens(
    backend: "tokenizers.Tokenizer", config: Mapping[str, Any], *, num_ids: int | None = None
) -> "tokenizers.Tokenizer":
    """``backend`` with the tokens of ``config``. Tokens whose ids would be ``num_ids`` or more are
    left out: the model has no such ids."""
    from tokenizers import AddedToken

    by_id = backend.get_added_tokens_decoder()
    there = {token.content: repr(token) for token in by_id.values()}
    named = [AddedToken(**token) for token in _named(config).values()]
    texts = {token.content for token in named}
    listed = {token_id: AddedToken(**token) for token_id, token in _listed(config)}
    if config.get(_LISTED) is None:
        listed |= by_id
    is_special = {token.content: token.special for token in by_id.values()}
    for token in listed.values():
        token.special |= token.content in texts or is_special.get(token.content, False)
    changed = [token for token in listed.values() if repr(token) != there.get(token.content)]
    known = there.keys() | {token.content for token in listed.values()}
    others = [*named, *(AddedToken(**token) for token in _extra(config))]
    others = [token for token in others if token.content not in known]
    tokens = [*changed, *{repr(token): token for token in others}.values()]
    backend.add_tokens(tokens if num_ids is None else _within(num_ids, backend, tokens))
    return backend


def _within(
    num_ids: int, backend: "tokenizers.Tokenizer", tokens: list["tokenizers.AddedToken"]
) -> list["tokenizers.AddedToken"]:
    """The tokens that are in the vocabulary or get an id below ``num_ids``."""
    ids = [backend.get_vocab_size(with_added_tokens=False) - 1, *backend.get_added_tokens_decoder()]
    new = [token.content for token in tokens if backend.token_to_id(token.content) is None]
    beyond = list(dict.fromkeys(new))[max(0, num_ids - 1 - max(ids)) :]
    return [token for token in tokens if token.content not in beyond]


def _read(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _merged(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``special_tokens_map.json``, whose values take precedence except for names of
    the model's own. Those tokens are in one object, as transformers has them."""
    merged = dict(config)
    if not merged.get(_EXTRA) and _OLD_EXTRA in merged:
        merged[_EXTRA] = merged.pop(_OLD_EXTRA)
    own = {name: merged.pop(name) for name in config if _is_own(name, config[name])}
    own |= merged.pop(_EXTRA) if isinstance(merged.get(_EXTRA), dict) else {}
    for name, value in older.items():
        is_list = name == _EXTRA and isinstance(value, list)
        merged[name] = [*(merged.get(_EXTRA) or []), *value] if is_list else value
    own |= merged.pop(_EXTRA) if isinstance(merged.get(_EXTRA), dict) else {}
    return merged | ({_OWN_NAMES: own} if own else {})


def _is_own(name: str, value: object) -> bool:
    return name.endswith("_token") and name not in _NAMES and isinstance(value, str)


def _named(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The named tokens, all of which are special: transformers' names first."""
    own = config.get(_OWN_NAMES) or {}
    if not isinstance(own, dict):
        raise _wrong(_OWN_NAMES, own, "an object of tokens")
    order = [*_NAMES, *(name for name in config if name.endswith("_token")), *own]
    tokens = {name: _special(own.get(name, config.get(name))) for name in order}
    return {name: token for name, token in tokens.items() if token is not None}


def _extra(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The special tokens without a name."""
    extra = config.get(_EXTRA if _EXTRA in config else _OLD_EXTRA) or []
    tokens = list(map(_special, extra)) if isinstance(extra, list) else [None]
    if None in tokens:
        raise _wrong(_EXTRA, extra, "a list of tokens, or an object of them")
    return [token for token in tokens if token is not None]


def _special(value: object) -> dict[str, Any] | None:
    """A special token, given as its text or as an object; ``None`` if it is neither."""
    token = {"content": value} if isinstance(value, str) else value
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        return None
    flags = {name: bool(token[name]) for name in _FLAGS if name in token}
    return {"content": token["content"], "normalized": False, **flags, "special": True}


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entries of ``added_tokens_decoder``, or of an older ``added_tokens.json``, by id."""
    if config.get(_LISTED) is None:
        yield from _old_listed(config)
        return
    listed = config[_LISTED]
    try:
        for token_id in sorted(listed, key=int):
            token = listed[token_id]
            flags = {name: bool(token[name]) for name in _FLAGS if name in token}
            yield int(token_id), {"content": str(token["content"]), **flags}
    except (LookupError, TypeError, ValueError):
        raise _wrong(_LISTED, listed, "an object with a token for each id") from None


def _old_listed(config: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    ids = config.get(_OLD_LISTED) or {}
    if not all(type(each) is int for each in ids.values()):
        raise CheckpointError(f"{_OLD_LISTED}: {reprlib.repr(ids)} must have an id for each token")
    special = {token["content"] for token in _extra(config)} if _EXTRA in config else set()
    special |= {text for name, text in named_tokens(config).items() if name in _NAMES}
    for text in sorted(ids, key=ids.__getitem__):
        is_special = text in special
        yield ids[text], {"content": text, "normalized": not is_special, "special": is_special}


def _wrong(name: str, value: object, right: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG_FILE}: {name}={reprlib.repr(value)} must be {right}")


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
