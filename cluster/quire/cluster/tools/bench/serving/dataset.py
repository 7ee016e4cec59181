"""Prompts of a load: generated, or from a file; each with the number of tokens to request.

Equal datasets and seeds give equal prompts. Generated prompts are token ids; a server that does not
accept ids receives a word for each.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.cluster.tools.bench.serving.config import Dataset
from quire.worker.request.errors import ConfigError

TokenIds = NDArray[np.int64]
Content = str | list[Any] | TokenIds
"""Text, a chat's messages, or token ids."""

_CUSTOM_OUTPUT_LEN = 256
_LEAST_TOKENS, _MOST_PROMPT_TOKENS, _MOST_TOKENS = 4, 1024, 2048
"""Limits for entries taken from ShareGPT: fewest and most tokens, as other benchmarks use them."""

_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl
guy moment air teacher force education
"""
WORDS = tuple(_WORDS.split())
"""Each is one token, with the space before it, in most vocabularies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The prompt of one request to send."""

    content: Content
    max_tokens: int
    is_made_up: bool = False
    """Whether it was generated, so that words serve as well as token ids."""
    at_s: float | None = None
    """When a trace's request arrived, in seconds after its first."""

    @property
    def text(self) -> str:
        """The content as text; messages have none."""
        if isinstance(self.content, np.ndarray):
            return " ".join(WORDS[token_id % len(WORDS)] for token_id in self.content.tolist())
        assert isinstance(self.content, str)
        return self.content


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The model's tokens, as far as known."""

    ids: TokenIds
    """Token ids that generated prompts consist of."""
    count: Callable[[str], int]
    """Counts the tokens of a text, without special tokens."""
    name: str | None = None

    @classmethod
    def guessed(cls) -> "Vocabulary":
        """Ids that are plain tokens of most models; a token counts as four characters."""
        return cls(ids=np.arange(300, 4_000), count=lambda text: ceil(len(text) / 4))

    @classmethod
    def of(cls, tokenizer: str) -> "Vocabulary":
        """The vocabulary of a tokenizer.

        Raises:
            ConfigError: No tokenizer can be loaded from there.
        """
        from tokenizers import Tokenizer

        path = Path(tokenizer)
        try:
            if path.is_dir():
                path = path / "tokenizer.json"
            read = (
                Tokenizer.from_file(str(path))
                if path.exists()
                else Tokenizer.from_pretrained(tokenizer)
            )
        except Exception as error:  # The library raises no specific class.
            raise ConfigError(
                f"tokenizer={tokenizer}: {error}; give a folder with a tokenizer.json, or a name "
                "on the hub"
            ) from None
        special = [id for id, token in read.get_added_tokens_decoder().items() if token.special]
        return cls(
            ids=np.setdiff1d(np.arange(read.get_vocab_size()), special),
            count=lambda text: len(read.encode(text, add_special_tokens=False).ids),
            name=tokenizer,
        )


def prompts_of(dataset: Dataset, vocabulary: Vocabulary) -> list[Prompt]:
    """At most ``num_prompts`` prompts. A file's prompts are not repeated: a server with a prefix
    cache would answer repetitions without work.

    Raises:
        ConfigError: The dataset's file cannot be read, or holds no request.
    """
    prompts = _MAKERS[dataset.name](dataset, vocabulary)
    if not prompts:
        raise ConfigError(f"{dataset.path}: there are no requests in it for {dataset.name}")
    return prompts


def _random(dataset: Dataset, vocabulary: Vocabulary) -> list[Prompt]:
    rng = np.random.default_rng(dataset.seed)
    number, ratio = dataset.num_prompts, dataset.random_range_ratio

    def lengths(mean: int) -> list[int]:
        low, high = max(floor(mean * (1 - ratio)), 1), ceil(mean * (1 + ratio))
        return [int(length) for length in rng.integers(low, high + 1, size=number)]

    input_lens, output_lens = lengths(dataset.random_input_len), lengths(dataset.random_output_len)
    prefix = _draw(rng, vocabulary, dataset.random_prefix_len)
    return [
        Prompt(
            content=np.concatenate([prefix, _draw(rng, vocabulary, input_len)]),
            max_tokens=output_len,
            is_made_up=True,
        )
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def _prefix_repetition(dataset: Dataset, vocabulary: Vocabulary) -> list[Prompt]:
    rng = np.random.default_rng(dataset.seed)
    num_prefixes = dataset.prefix_repetition_num_prefixes
    prefixes = [
        _draw(rng, vocabulary, dataset.prefix_repetition_prefix_len) for _ in range(num_prefixes)
    ]
    chosen = rng.permutation(np.arange(dataset.num_prompts) % num_prefixes)
    suffix_len = dataset.prefix_repetition_suffix_len
    return [
        Prompt(
            content=np.concatenate([prefixes[prefix], _draw(rng, vocabulary, suffix_len)]),
            max_tokens=dataset.prefix_repetition_output_len,
            is_made_up=True,
        )
        for prefix in chosen
    ]


def _trace(dataset: Dataset, vocabulary: Vocabulary) -> list[Prompt]:
    """Prompts that share blocks exactly where the trace's requests do."""
    from quire.simulate.trace_files import load_trace

    assert dataset.path is not None
    trace = load_trace(dataset.path, format=dataset.trace_format).at_speed(dataset.trace_speed)
    rng = np.random.default_rng(dataset.seed)
    prompts = []
    for row in trace.rows[: dataset.num_prompts]:
        blocks = [
            _draw(
                np.random.default_rng([dataset.seed, int.from_bytes(name[:8])]),
                vocabulary,
                trace.block_size,
            )
            for name in row.chain
        ]
        own = _draw(rng, vocabulary, row.num_input - trace.block_size * len(blocks))
        prompts.append(
            Prompt(
                content=np.concatenate([*blocks, own]),
                max_tokens=row.num_output,
                is_made_up=True,
                at_s=row.arrival_ms / 1000,
            )
        )
    return prompts


def _sharegpt(dataset: Dataset, vocabulary: Vocabulary) -> list[Prompt]:
    """The first message of each conversation, with the length of its first answer."""
    assert dataset.path is not None
    try:
        talks = json.loads(_read(dataset.path))
        turns = [[str(turn["value"]) for turn in talk.get("conversations", [])] for talk in talks]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{dataset.path}: {error}; ShareGPT is a JSON list of objects with conversations, each "
            "a list of objects with a value"
        ) from None
    random.Random(dataset.seed).shuffle(turns)
    prompts: list[Prompt] = []
    for texts in turns:
        if len(prompts) == dataset.num_prompts:
            break
        if len(texts) < 2:
            continue
        num_prompt = vocabulary.count(texts[0])
        num_output = dataset.output_len or vocabulary.count(texts[1])
        if (
            _LEAST_TOKENS <= num_prompt <= _MOST_PROMPT_TOKENS
            and (dataset.output_len or num_output >= _LEAST_TOKENS)
            and num_prompt + num_output <= _MOST_TOKENS
        ):
            prompts.append(Prompt(content=texts[0], max_tokens=num_output))
    return prompts


def _custom(dataset: Dataset, vocabulary: Vocabulary) -> list[Prompt]:
    assert dataset.path is not None
    lines = _read(dataset.path).splitlines()
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if len(prompts) == dataset.num_prompts:
            break
        if not line.strip():
            continue
        try:
            prompts.append(_custom_line(json.loads(line), dataset.output_len))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{dataset.path}, line {number}: {error}") from None
    return prompts


def _custom_line(row: Any, output_len: int | None) -> Prompt:
    """The prompt of one line. Raises ValueError if it is not a request."""
    if not isinstance(row, dict):
        raise ValueError("must be an object with prompt, messages or prompt_token_ids")
    content = next(_contents(row), None)
    if content is None:
        raise ValueError(
            "must have prompt (a text or token ids), messages (a list) or prompt_token_ids"
        )
    lengths = (row.get("output_tokens"), row.get("max_tokens"), _CUSTOM_OUTPUT_LEN)
    length = output_len or next(length for length in lengths if length is not None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"output_tokens is {length!r}, and must be 1 or more")
    return Prompt(content=content, max_tokens=length)


def _contents(row: dict[str, Any]) -> Iterator[Content]:
    for name in ("prompt", "prompt_token_ids"):
        value = row.get(name)
        if isinstance(value, str) and name == "prompt" and value:
            yield value
        elif isinstance(value, list) and value:
            if not all(type(each) is int and each >= 0 for each in value):
                raise ValueError(f"{name} must be a text or a list of token ids")
            yield np.array(value, dtype=np.int64)
    if isinstance(row.get("messages"), list) and row["messages"]:
        yield row["messages"]


def _draw(rng: np.random.Generator, vocabulary: Vocabulary, length: int) -> TokenIds:
    return vocabulary.ids[rng.integers(len(vocabulary.ids), size=length)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: {reason}; give a text file") from None


_MAKERS: dict[str, Callable[[Dataset, Vocabulary], list[Prompt]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "trace": _trace,
}


def arrivals(
    prompts: Sequence[Prompt], *, request_rate: float | None, burstiness: float, seed: int
) -> list[float]:
    """The send time of each prompt, in seconds from the start.

    At a rate, gaps follow a gamma distribution and are scaled so that the last of N requests is
    sent after N / rate.
    """
    if request_rate is None:
        return [prompt.at_s or 0.0 for prompt in prompts]
    if request_rate == float("inf"):
        return [0.0] * len(prompts)
    rng = np.random.default_rng([seed, 1])  # A different stream than the prompts use.
    gaps = rng.gamma(burstiness, 1 / (request_rate * burstiness), size=len(prompts))
    times = np.cumsum(gaps)
    scale = len(prompts) / request_rate / times[-1] if times[-1] > 0 else 0.0
    return [float(time) for time in times * scale]
