"""How a request's tokens are chosen and when it ends. Names and meanings are vLLM's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.worker.api.errors import InvalidRequest
from quire.worker.api.structured import Constraint, StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_STOP_CHARS = 1000
"""Longest stop string."""
MAX_STOP_TOKEN_IDS = 1000
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 65536
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 100
MAX_BAD_SEQUENCES = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_TOKENS = 2**15
"""Of all ``bad_words_token_ids`` together."""

_MOST_IDS = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
    "logprob_token_ids": MAX_LOGPROB_TOKEN_IDS,
    "thinking_token_ids": 2,
}
"""The lists of token ids by name, and how many each may have."""
_MAX_SHOWN_CHARS = 200
_STOPS = "at most 16 strings, none empty"
_IDS = "token ids, 0 or more"
_BAD_WORDS = (
    f"at most {MAX_BAD_WORDS} strings of {MAX_BAD_WORD_CHARS} characters or fewer, none blank"
)
_SEQUENCES = (
    f"at most {MAX_BAD_SEQUENCES} lists of token ids, none empty, of {MAX_BAD_TOKENS} tokens "
    "together"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    Raises:
        InvalidRequest: A value is out of its range; the message names field, value and range.
    """

    n: int = 1
    """How many completions to draw from the prompt; completion ``i`` uses ``seed + i``."""
    temperature: float = 1.0
    """0 is greedy: the token of the largest logit, the lowest id among equals."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens whose probabilities add up to at least this."""
    top_k: int = 0
    """Keep the ``top_k`` most probable tokens; 0 keeps all (-1 too, as in vLLM)."""
    min_p: float = 0.0
    """Drop tokens less probable than ``min_p`` times the most probable one."""
    max_tokens: int | None = 16
    """Tokens to generate at most; ``None`` is as many as the context has room for."""
    min_tokens: int = 0
    """Neither end-of-sequence nor a stop token is sampled before this many tokens, as long as
    ``allowed_token_ids`` or the form of the output leave another."""
    seed: int | None = None
    """Seeds this request's sampling; ``None`` lets the engine choose one."""
    stop: str | Sequence[str] | None = None
    """Strings that end the text; the string itself is left out of it."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the request; the token stays in ``token_ids``, not in the text."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence token."""
    logprobs: int | None = None
    """Report the log-probability of each sampled token and of this many most probable ones."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first, which has none before it. Such a prompt
    is computed whole, whatever of it is cached."""
    logprob_token_ids: Sequence[int] | None = None
    """Report the log-probabilities of these tokens too, wherever one is sampled."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens at the end of the prompt; -1 keeps what leaves room for ``max_tokens``
    in the context, or for one token where those are not given."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output already holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the output holds it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of some tokens, -100 to 100, by token id. Ids may be text."""
    allowed_token_ids: Sequence[int] | None = None
    """Tokens that may be sampled; ``None`` or none at all allows every one."""
    bad_words: Sequence[str] | None = None
    """Words that the output must not hold: the last token of a word, as the tokenizer writes it
    with or without a space before it, is not sampled behind the word's other tokens. Where
    ``allowed_token_ids`` or the form of the output leave no other token, it is."""
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """The same as tokens. What has a tokenizer puts those of ``bad_words`` here."""
    thinking_token_budget: int | None = None
    """Tokens that the reasoning has at most: behind them the one that ends it is sampled, whatever
    else bans it but the form of the output."""
    thinking_token_ids: Sequence[int] | None = None
    """The tokens that begin and end the reasoning; the end alone where the prompt has begun it.
    What has a tokenizer puts them here for ``thinking_token_budget``."""
    structured_outputs: StructuredOutputsParams | Constraint | None = None
    """The form that the output must have: JSON of a schema, say. Kept as a `Constraint`."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # The dataclass is frozen once this returns.
        given = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _listed("stop", given, _STOPS)
        set_field(self, "stop", stop)
        for name in _MOST_IDS:
            set_field(self, name, _listed(name, getattr(self, name), _IDS))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        set_field(self, "bad_words", _listed("bad_words", words, _BAD_WORDS))
        sequences = _listed("bad_words_token_ids", self.bad_words_token_ids, _SEQUENCES)
        sequences = tuple(_listed("bad_words_token_ids", each, _SEQUENCES) for each in sequences)
        set_field(self, "bad_words_token_ids", sequences)
        if self.logit_bias is not None:
            set_field(self, "logit_bias", _biases(self.logit_bias))
        if self.top_k == -1:
            set_field(self, "top_k", 0)
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            set_field(self, "structured_outputs", self.structured_outputs.constraint)
        elif not isinstance(self.structured_outputs, Constraint | None):
            raise InvalidRequest(
                f"structured_outputs={_shown(self.structured_outputs)} must be "
                "StructuredOutputsParams, such as StructuredOutputsParams(json=…)"
            )

        _require(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "from 1 to 128")
        _require(_in_range(self.temperature, 0, 100), "temperature", self.temperature, "0 to 100")
        _require(
            _in_range(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0, up to 1"
        )
        _require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 or more")
        _require(_in_range(self.min_p, 0, 1), "min_p", self.min_p, "0 to 1")
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "1 or more",
        )
        _require(
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= (self.max_tokens or math.inf),
            "min_tokens",
            self.min_tokens,
            f"0 to max_tokens ({self.max_tokens})",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED),
            "seed",
            self.seed,
            "0 to 2**63 - 1",
        )
        _require(
            len(stop) <= 16 and all(isinstance(s, str) and s for s in stop),
            "stop",
            self.stop,
            _STOPS,
        )
        bad_words = self.bad_words or ()
        is_list = len(bad_words) <= MAX_BAD_WORDS and all(
            isinstance(word, str) and word.strip() and len(word) <= MAX_BAD_WORD_CHARS
            for word in bad_words
        )
        _require(is_list, "bad_words", bad_words, _BAD_WORDS)
        is_list = len(sequences) <= MAX_BAD_SEQUENCES and all(
            each and all(_is_int(token) and token >= 0 for token in each) for each in sequences
        )
        is_list = is_list and sum(map(len, sequences)) <= MAX_BAD_TOKENS
        _require(is_list, "bad_words_token_ids", sequences, _SEQUENCES)
        for name in _MOST_IDS:
            value = getattr(self, name)
            _require(all(_is_int(t) and t >= 0 for t in value), name, value, _IDS)
        # They travel with the request and are looked for after each token.
        longest = max(map(len, stop), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop has a string of {longest} characters: at most {MAX_STOP_CHARS}"
            )
        for name, most in _MOST_IDS.items():
            if len(getattr(self, name)) > most:
                raise InvalidRequest(f"{name} has {len(getattr(self, name))}: at most {most}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            is_count = value is None or (_is_int(value) and 0 <= value <= MAX_LOGPROBS)
            _require(is_count, name, value, f"0 to {MAX_LOGPROBS}")
        budget = self.thinking_token_budget
        is_count = budget is None or (_is_int(budget) and 0 <= budget < 2**31)
        _require(is_count, "thinking_token_budget", budget, "0 or more")
        kept = self.truncate_prompt_tokens
        is_count = kept is None or (_is_int(kept) and (kept == -1 or 1 <= kept < 2**31))
        _require(is_count, "truncate_prompt_tokens", kept, "-1, or 1 or more")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_in_range(value, -2, 2), name, value, "-2 to 2")
        _require(
            _in_range(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0, up to 100",
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def constraint(self) -> Constraint | None:
        """`structured_outputs`, as it is kept."""
        assert not isinstance(self.structured_outputs, StructuredOutputsParams)
        return self.structured_outputs

    @property
    def num_logprobs(self) -> int:
        """-1: none; 0: that of the sampled token; k: those of the k most probable too."""
        if self.logprobs is None:
            return 0 if self.logprob_token_ids else -1
        return self.logprobs

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, *, num_prompts: int
) -> list[SamplingParams]:
    """Expands parameters for all prompts, or for each prompt, to one for each.

    Raises:
        InvalidRequest: They are of another number, or something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    given: Sequence[object] = params if isinstance(params, list | tuple) else [params]
    listed = [each for each in given if isinstance(each, SamplingParams)]
    if len(listed) < len(given):
        raise InvalidRequest(
            f"sampling_params={params!r}: must be a SamplingParams, or one for each prompt"
        )
    if len(listed) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts and {len(listed)} sampling_params: give one for all or one "
            "for each"
        )
    return listed


def _biases(given: Mapping[Any, Any]) -> dict[int, float] | None:
    """By token id; ``None`` where there is none."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"logit_bias={given!r} is out of range: token ids and their biases")
    if len(given) > MAX_LOGIT_BIASES:
        raise InvalidRequest(f"logit_bias has {len(given)} tokens: at most {MAX_LOGIT_BIASES}")
    for token, bias in given.items():
        is_id = token.isdecimal() if isinstance(token, str) else _is_int(token) and token >= 0
        _require(is_id and int(token) < 2**31, "logit_bias", token, "token ids, 0 or more")
        is_bias = _in_range(bias, -100, 100)
        _require(is_bias, "logit_bias", {token: bias}, "biases from -100 to 100")
    return {int(token): float(bias) for token, bias in given.items()} or None


def _listed(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError:
        raise InvalidRequest(f"{name}={value!r} is out of range: {allowed}") from None


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name}={_shown(value)} is out of range: {allowed}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}…"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_range(value: object, low: float, high: float) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )
