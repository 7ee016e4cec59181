"""How a request's tokens are chosen and when it ends. Names and meanings are vLLM's."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from quire.worker.request.arguments import explains_arguments
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.parameter import (
    biases,
    id_lists,
    ids,
    real,
    rules_of,
    shown,
    strings,
    whole,
)
from quire.worker.request.structured import Constraint, StructuredOutputsParams
from quire.worker.request.vllm_names import SAMPLING

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_STOP_CHARS = 1000
"""Longest stop string."""


@explains_arguments(SAMPLING)
@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request.

    Raises:
        InvalidRequest: A value is out of its range; the message names field, value and range.
        UnknownArgument: There is no such parameter; the message says what to do.
    """

    n: Annotated[int, whole(1, 128, said="from 1 to 128")] = 1
    """Number of completions of the prompt; completion ``i`` uses ``seed + i``."""
    temperature: Annotated[float, real(0, 100)] = 1.0
    """0 is greedy: the token with the largest logit, and the lowest id among equals."""
    top_p: Annotated[float, real(0, 1, but=0, said="above 0, up to 1")] = 1.0
    """Keep the smallest set of most probable tokens whose probabilities add up to at least this."""
    top_k: Annotated[int, whole(-1, said="0 or more")] = 0
    """Keep the ``top_k`` most probable tokens; 0 keeps all (-1 too, as in vLLM)."""
    min_p: Annotated[float, real(0, 1)] = 0.0
    """Drop tokens less probable than ``min_p`` times the most probable one."""
    max_tokens: Annotated[int | None, whole(1)] = 16
    """Most tokens to generate; ``None`` is as many as the context has room for."""
    min_tokens: int = 0
    """Before this many tokens, no end-of-sequence or stop token is sampled, unless
    ``allowed_token_ids`` or a structured output leaves no other, and no stop string that is
    complete by then ends the text."""
    seed: Annotated[int | None, whole(0, MAX_SEED, said="0 to 2**63 - 1")] = None
    """Seeds this request's sampling; ``None`` lets the engine choose one."""
    stop: Annotated[str | Sequence[str] | None, strings(16, but="empty")] = None
    """Strings that end the text; the string itself is not part of it."""
    stop_token_ids: Annotated[Sequence[int] | None, ids(1000)] = None
    """Token ids that end the request; the token is in ``token_ids``, but not in the text."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence token."""
    logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    """Return the log-probability of each sampled token and of this many most probable ones."""
    prompt_logprobs: Annotated[int | None, whole(0, MAX_LOGPROBS)] = None
    """The same for each token of the prompt except the first. Such a prompt is computed
    completely even if it is cached, except for the tokens that ``logprob_start_len`` skips."""
    logprob_start_len: Annotated[int, whole(0)] = 0
    """Number of tokens at the beginning of the prompt that ``prompt_logprobs`` skips. If they are
    cached, they are not computed again. SGLang's name."""
    logprob_token_ids: Annotated[Sequence[int] | None, ids(128)] = None
    """Also return the log-probabilities of these tokens, at every sampled token."""
    truncate_prompt_tokens: Annotated[
        int | None, whole(-1, 2**31 - 1, but=0, said="-1, or 1 or more")
    ] = None
    """Keep only this many tokens at the end of the prompt; -1 keeps as many as leave room for
    ``max_tokens`` in the context, or for one token if ``max_tokens`` is not given."""
    presence_penalty: Annotated[float, real(-2, 2)] = 0.0
    """Subtracted from the logit of each token that is already in the output."""
    frequency_penalty: Annotated[float, real(-2, 2)] = 0.0
    """Subtracted from a token's logit once for each time that it is in the output."""
    repetition_penalty: Annotated[float, real(0.01, 100)] = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or output."""
    # Logits overflow their float32 with a factor that is much smaller or greater.
    logit_bias: Annotated[Mapping[int, float] | None, biases(1024, limit=100)] = field(
        default=None, hash=False
    )
    """Values from -100 to 100 added to the logits of tokens, by token id. Ids may be strings."""
    allowed_token_ids: Annotated[Sequence[int] | None, ids(65536)] = None
    """The only tokens that may be sampled; ``None`` or an empty list allows all."""
    bad_words: Annotated[Sequence[str] | None, strings(128, but="blank", max_chars=100)] = None
    """Words that the output must not contain. The last token of a word, tokenized with or without
    a space before it, is not sampled after the word's other tokens, unless ``allowed_token_ids`` or
    a structured output leaves no other token."""
    bad_words_token_ids: Annotated[
        Sequence[Sequence[int]] | None, id_lists(1024, 2**15, over_http=False)
    ] = None
    """The same as tokens. What has a tokenizer puts those of ``bad_words`` here."""
    thinking_token_budget: Annotated[int | None, whole(0, 2**31 - 1, said="0 or more")] = None
    """Most tokens of the reasoning. After them the token that ends it is forced, even if a ban
    excludes it, unless a structured output does not allow it."""
    thinking_token_ids: Annotated[Sequence[int] | None, ids(2, over_http=False)] = None
    """The tokens that begin and end the reasoning; the end alone where the prompt has begun it.
    What has a tokenizer puts them here for ``thinking_token_budget``."""
    structured_outputs: StructuredOutputsParams | Constraint | None = None
    """Constraint of the output, such as a JSON schema. Stored as a `Constraint`."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # The dataclass is frozen once this returns.
        for name, (default, kept) in _DEFAULTS.items():
            if (value := getattr(self, name)) is not default:
                kept = PARAMETERS[name].kept(name, value)
            set_field(self, name, kept)
        if self.top_k == -1:
            set_field(self, "top_k", 0)
        most = whole(0, self.max_tokens or math.inf, said=f"0 to max_tokens ({self.max_tokens})")
        most.kept("min_tokens", self.min_tokens)
        # They travel with the request and are looked for after each token.
        longest = max(map(len, self.stop_strings), default=0)
        if longest > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop has a string of {longest} characters: at most {MAX_STOP_CHARS}", param="stop"
            )
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            set_field(self, "structured_outputs", self.structured_outputs.constraint)
        elif not isinstance(self.structured_outputs, Constraint | None):
            raise InvalidRequest(
                f"structured_outputs={shown(self.structured_outputs)} must be "
                "StructuredOutputsParams, such as StructuredOutputsParams(json=…)",
                param="structured_outputs",
            )

    def changed(self, **values: Any) -> "SamplingParams":
        """A copy with other values, in the form that is kept. They are not checked."""
        made = copy.copy(self)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    def of_completion(self, number: int) -> "SamplingParams":
        """Those of one completion of ``n``, which have a seed."""
        assert self.seed is not None
        scores = None if number else self.prompt_logprobs
        return self.changed(n=1, seed=(self.seed + number) & MAX_SEED, prompt_logprobs=scores)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    def end_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end the output, where ``eos_token_ids`` end it too."""
        return frozenset((*(self.stop_token_ids or ()), *eos_token_ids))

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


PARAMETERS = rules_of(SamplingParams)
"""The rule of each field, by its name."""
_DEFAULTS = {
    each.name: (each.default, PARAMETERS[each.name].kept(each.name, each.default))
    for each in fields(SamplingParams)
}
"""Each field's default, and the form in which the default is kept."""


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
            f"sampling_params={params!r}: must be a SamplingParams, or one for each prompt",
            param="sampling_params",
        )
    if len(listed) != num_prompts:
        raise InvalidRequest(
            f"{num_prompts} prompts and {len(listed)} sampling_params: give one for all or one "
            "for each"
        )
    return listed
