"""Builds the tokenizer from a GGUF file's metadata, which contains the vocabulary and the name of a
pre-tokenizer. llama.cpp and the published tokenizers define what each name means."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from quire.worker.request.errors import CheckpointError
from quire.worker.weights.gguf.container import Header, Strings
from quire.worker.weights.gguf.describe import CONTROL, ENDS, USER_DEFINED

_NORMAL = 1
_SPACE = "▁"
_NAMES = {
    **{f"{name}_token": f"{name}_token_id" for name in ("bos", "eos", "cls", "mask")},
    **{"unk_token": "unknown_token_id", "pad_token": "padding_token_id"},
    "sep_token": "seperator_token_id",  # As GGUF spells it.
}
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD, _SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_AND_SLASHES}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORT}|{_LEAD}{_UPPER}+{_LOWER}*{_SHORT}"
    rf"|\p{{N}}{{1,3}}|{_REST_AND_SLASHES}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Split:
    """A pre-tokenizer: how text is split before byte pairs are merged."""

    pattern: str | None = None
    """The regular expression; ``None`` for GPT-2's."""
    digits: bool = False
    """Whether each digit is a piece of its own."""
    nfc: bool = False
    ignore_merges: bool = False
    """Whether a piece that is in the vocabulary becomes that token without applying merges."""
    add_bos: bool = False
    """Whether texts begin with the BOS token, if the file does not say."""


_SPLITS = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        _Split(pattern=_LLAMA3, ignore_merges=True, add_bos=True),
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Split(pattern=_LLAMA3)),
    "qwen2": _Split(pattern=_QWEN2, nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez"), _Split(pattern=_QWEN2)),
    "tekken": _Split(pattern=_TEKKEN, ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split(pattern=_GPT4O)),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Split(digits=True)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), _Split()),
}


def tokenizer_config(header: Header) -> dict[str, Any]:
    """The fields of a ``tokenizer_config.json``: the texts of special tokens by name, and chat
    templates.

    Raises:
        CheckpointError: The file has no vocabulary.
    """
    vocabulary = _Vocabulary(header)
    config: dict[str, Any] = dict(vocabulary.named)
    templates = {
        key.removeprefix("tokenizer.chat_template").removeprefix(".") or "default": value
        for key, value in header.metadata.items()
        if key.startswith("tokenizer.chat_template") and isinstance(value, str)
    }
    if templates:
        config["chat_template"] = [
            {"name": name, "template": source} for name, source in templates.items()
        ]
    return config


def build_tokenizer(header: Header) -> tokenizers.Tokenizer:
    """The tokenizer.

    Raises:
        CheckpointError: It is of an unsupported kind, or parts of it are missing or wrong.
    """
    vocabulary = _Vocabulary(header)
    kind = header.metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(
            f"{header.file}: tokenizer.ggml.model={kind!r} is not supported; supported: "
            f"{', '.join(builders)}; without a tokenizer, prompts and answers are token ids"
        )
    try:
        backend, add_bos = builders[kind](vocabulary)
        _add_tokens(backend, vocabulary)
        backend.post_processor = _post_processor(vocabulary, add_bos=add_bos)
    except CheckpointError:
        raise
    except Exception as error:  # The library raises no narrower type.
        raise CheckpointError(
            f"{header.file}: its vocabulary makes no tokenizer: {error}: convert the model again"
        ) from error
    return backend


class _Vocabulary:
    """The fields of a header that describe the tokenizer."""

    def __init__(self, header: Header) -> None:
        self.header = header
        strings = self.get("tokens")
        if not isinstance(strings, Strings) or not strings.count:
            raise CheckpointError(
                f"{header.file}: has no tokenizer.ggml.tokens, and so no tokenizer: prompts and "
                "answers are token ids"
            )
        self.tokens = strings.read()
        types = self.get("token_type")
        self.types: Sequence[int] = types if isinstance(types, array) else []
        if self.types and len(self.types) != len(self.tokens):
            raise CheckpointError(
                f"{header.file}: {len(self.types)} types of {len(self.tokens)} tokens: get a sound "
                "copy"
            )
        self.types = self.types or [_NORMAL] * len(self.tokens)

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{name}", default)

    def strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, Strings):
            raise CheckpointError(
                f"{self.header.file}: has no tokenizer.ggml.{name}: convert the model again"
            )
        return value.read()

    @property
    def named(self) -> dict[str, str]:
        """The texts of special tokens by name."""
        ids = {name: self.get(key) for name, key in _NAMES.items()}
        return {
            name: self.tokens[token_id]
            for name, token_id in ids.items()
            if isinstance(token_id, int) and 0 <= token_id < len(self.tokens)
        }


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE as in GPT-2; and whether texts begin with BOS by default."""
    name = vocabulary.get("pre")
    if name not in _SPLITS:
        raise CheckpointError(
            f"{vocabulary.header.file}: tokenizer.ggml.pre={name!r} is not known, and so how text "
            f"is split into words; known: {', '.join(_SPLITS)}; convert the model again, or serve "
            "its safetensors files"
        )
    split = _SPLITS[name]
    merges: Any = [tuple(merge.split(" ")) for merge in vocabulary.strings("merges")]
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    model = models.BPE(vocab=ids, merges=merges, ignore_merges=split.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    before: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        before.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        before.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """sentencepiece's BPE, with spaces as characters; and whether BOS is added by default."""
    tokens = list(vocabulary.tokens)
    for token_id, kind in enumerate(vocabulary.types):
        if kind == USER_DEFINED:  # These are matched in the text itself.
            tokens[token_id] = tokens[token_id].replace(_SPACE, " ")
    vocabulary.tokens = tokens
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=ids,
        merges=_merges(vocabulary, ids),
        unk_token=vocabulary.named.get("unk_token"),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        text.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(text)
    return backend, True


def _merges(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of tokens that merge into a third, the best resulting token first, in the order of
    transformers' converter."""
    scores = vocabulary.get("scores")
    if not isinstance(scores, array) or len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{vocabulary.header.file}: has no tokenizer.ggml.scores for its tokens: get a sound "
            "copy"
        )
    merges: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True):
        if kind != _NORMAL or len(token) > _MOST_CHARS:
            continue
        ways = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ways = [way for way in ways if way[0] in ids and way[1] in ids]
        ways.sort(key=lambda way: (ids[way[0]], ids[way[1]]))
        merges += [(score, len(way[0]), len(way[1]), way) for way in ways]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [way for *_, way in merges]


_MOST_CHARS = 1000
"""The longest token whose merges are derived, since the work is quadratic in its length."""


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Adds the tokens that are matched as a whole wherever they occur in a text."""
    named = set(vocabulary.named.values())
    is_phi3 = vocabulary.header.architecture == "phi3" and vocabulary.get("model") == "llama"
    added = []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        is_special = kind == CONTROL or token in named
        if not is_special and kind != USER_DEFINED:
            continue
        added.append(
            AddedToken(
                token,
                special=is_special or token in ENDS,
                normalized=False,
                # White space after Phi-3's tokens belongs to them, which no field says.
                rstrip=is_phi3 and is_special and token not in _NOT_STRIPPED,
            )
        )
    backend.add_tokens([token for token in added if token.content])


def _post_processor(
    vocabulary: _Vocabulary, *, add_bos: bool
) -> processors.TemplateProcessing | None:
    """The post-processor that adds the tokens at the beginning and end of texts."""
    named, ids = vocabulary.named, {}
    single = ["$A"]
    if vocabulary.get("add_bos_token", add_bos) and "bos_token" in named:
        single.insert(0, named["bos_token"])
        ids[named["bos_token"]] = vocabulary.get("bos_token_id")
    if vocabulary.get("add_eos_token", False) and "eos_token" in named:
        single.append(named["eos_token"])
        ids[named["eos_token"]] = vocabulary.get("eos_token_id")
    if not ids:
        return None
    return processors.TemplateProcessing(single=single, special_tokens=list(ids.items()))
