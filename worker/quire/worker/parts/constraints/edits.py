"""One request's changes to its logits, updated token by token: penalties, biases, bans, budgets."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from quire.worker.blocks.hashing import TokenIds
from quire.worker.engine.choices import PLAIN, Choices
from quire.worker.request.arrays import Floats, Ints, Longs
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.step.sampling_batch import MASK_BITS, Edits

# A biased tokens   E seen tokens


def choices_of(request: Prepared, end_ids: frozenset[int]) -> Choices:
    """The choices of a request whose constraint, if any, is not compiled yet. ``end_ids`` are the
    tokens that must not be sampled before ``min_tokens``, even if ``ignore_eos`` is set, as in
    vLLM."""
    edits = RequestEdits(
        request.sampling,
        prompt_ids=request.prompt_token_ids,
        output_ids=request.resumed_token_ids,
        end_ids=end_ids,
    )
    return PLAIN if edits.is_empty else edits


class RequestEdits(Choices):
    """The `Edits` of each token that a request samples.

    ``params`` cause six kinds of changes: the forced end of reasoning when its budget is spent;
    penalties, which depend on the output; a ban of the last token of a bad word, when the output
    ends with the tokens before it; tokens banned until ``min_tokens``; changes that are the same
    for every token; and, with a constraint, the mask of allowed tokens, set by `allow`.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_ids: TokenIds,
        output_ids: TokenIds,
        end_ids: frozenset[int],
    ) -> None:
        """``end_ids`` are the tokens that must not be sampled before ``params.min_tokens``."""
        self._params = params
        self._seen = _Seen(params, prompt_ids, output_ids) if params.has_penalties else None
        bad_words = params.bad_words_token_ids
        self._bad_words = _BadWords(bad_words, output_ids) if bad_words else None
        self._thinking = None
        if params.thinking_token_budget is not None and params.thinking_token_ids:
            self._thinking = _Thinking(
                params.thinking_token_budget, params.thinking_token_ids, output_ids
            )
        self._always = dict(params.logit_bias or {})
        self._bias = _bias(self._always)
        # A ban outweighs any bias.
        self._at_first = self._always | dict.fromkeys(end_ids, -np.inf)
        self._early = _bias(self._at_first) if params.min_tokens else None

        allowed = params.allowed_token_ids
        self._mask_W = _mask(np.array(allowed, np.int64)) if allowed else None
        self._is_constrained = params.constraint is not None
        self._end_ids: Longs = np.array(sorted(end_ids), np.int64)
        # If only end tokens are allowed, they stay allowed.
        self._early_mask_W = None if self._mask_W is None else _without(self._mask_W, self._end_ids)
        self._next_mask_W: Ints | None = None
        self._bans_end_of_thinking = False
        follows = self._bad_words is not None and self._bad_words.follows_output
        thinks = self._thinking is not None
        self.follows_tokens = self._seen is not None or follows or self._is_constrained or thinks

    @property
    def is_empty(self) -> bool:
        """Whether the request never changes a logit."""
        kinds = (
            *(self._seen, self._bad_words, self._early, self._bias, self._mask_W),
            self._thinking,
        )
        return not self._is_constrained and all(kind is None for kind in kinds)

    def allow(self, mask_W: Ints, *, num_output: int) -> bool:
        """Sets ``mask_W``, the tokens that a constraint allows after ``num_output`` tokens. Returns
        whether the other parameters leave any of them.

        A constraint outweighs ``min_tokens``: if it allows only end tokens, they may be sampled. It
        also outweighs bad words, and the reasoning budget if it forbids the end of reasoning.
        """
        if self._thinking is not None:
            self._bans_end_of_thinking = not _has(mask_W, self._thinking.end_id)
            if self._thinking.must_end and not self._bans_end_of_thinking:
                return True
        if self._mask_W is not None:
            both_W = np.zeros_like(mask_W)
            num_words = min(len(mask_W), len(self._mask_W))
            both_W[:num_words] = mask_W[:num_words] & self._mask_W[:num_words]
            mask_W = both_W
        if num_output < self._params.min_tokens:
            mask_W = _without(mask_W, self._end_ids)
        self._next_mask_W = mask_W
        return bool(mask_W.any())

    def draft(self, token_ids: list[int], *, num_output: int) -> list[Edits | None]:
        return self.behind(token_ids, num_output=num_output, masks=None)

    def behind(
        self, token_ids: Sequence[int], *, num_output: int, masks: Sequence[Ints] | None
    ) -> list[Edits | None]:
        """The changes after each of ``token_ids``, if these followed ``num_output`` other tokens.

        ``masks`` are the tokens that a constraint allows after each of the first ``token_ids``. The
        result ends where no mask is left, or where other parameters leave no allowed token.
        """
        ahead = copy(self)
        ahead._seen = copy(self._seen)
        ahead._bad_words = copy(self._bad_words)
        ahead._thinking = copy(self._thinking)
        found = []
        for number, token_id in enumerate(token_ids[: None if masks is None else len(masks)]):
            ahead.accept(token_id)
            num_output += 1
            if masks is not None and not ahead.allow(masks[number], num_output=num_output):
                break
            each = ahead.edits(num_output)
            if each is not None and ahead._seen is not None:
                each = replace(
                    each,
                    seen_ids_E=each.seen_ids_E.copy(),
                    seen_counts_E=each.seen_counts_E.copy(),
                )
            found.append(each)
        return found

    def accept(self, token_id: int) -> None:
        if self._seen is not None:
            self._seen.add(token_id)
        if self._bad_words is not None:
            self._bad_words.add(token_id)
        if self._thinking is not None:
            self._thinking.add(token_id)

    def edits(self, num_output: int) -> Edits | None:
        thinking = self._thinking
        if thinking is not None and thinking.must_end and not self._bans_end_of_thinking:
            return Edits(mask_W=thinking.end_mask_W)
        bias, mask_W = self._bias, self._mask_W
        if self._is_constrained:
            mask_W = self._next_mask_W
        elif num_output < self._params.min_tokens:
            bias, mask_W = (self._early, None) if mask_W is None else (bias, self._early_mask_W)
        banned = self._bad_words.banned() if self._bad_words is not None else ()
        if banned and mask_W is not None:
            mask_W = _without(mask_W, np.array(banned, np.int64))
        elif banned:
            others = self._at_first if bias is self._early else self._always
            bias = _bias(others | dict.fromkeys(banned, -np.inf))
        if self._seen is None and bias is None and mask_W is None:
            return None
        values: dict[str, Any] = {"mask_W": mask_W}
        if bias is not None:
            values["biased_ids_A"], values["bias_A"] = bias
        if self._seen is None:
            return Edits(**values)
        return Edits(
            **values,
            seen_ids_E=self._seen.ids_E,
            seen_counts_E=self._seen.counts_E,
            presence=self._params.presence_penalty,
            frequency=self._params.frequency_penalty,
            repetition=self._params.repetition_penalty,
        )


class _Seen:
    """The distinct tokens that penalties apply to, ascending, and how often each occurs in the
    output."""

    def __init__(self, params: SamplingParams, prompt_ids: TokenIds, output_ids: TokenIds) -> None:
        # Only the repetition penalty applies to tokens of the prompt.
        counted = [output_ids] if params.repetition_penalty == 1 else [prompt_ids, output_ids]
        ids, index = np.unique(np.concatenate(counted), return_inverse=True)
        self._num = len(ids)
        self._ids: Longs = ids.astype(np.int64)
        self._counts: Ints = np.zeros(self._num, np.int32)
        np.add.at(self._counts, index[len(index) - len(output_ids) :], 1)

    def __copy__(self) -> "_Seen":
        other = object.__new__(_Seen)
        other._num, other._ids, other._counts = self._num, self._ids.copy(), self._counts.copy()
        return other

    @property
    def ids_E(self) -> Longs:
        return self._ids[: self._num]

    @property
    def counts_E(self) -> Ints:
        return self._counts[: self._num]

    def add(self, token_id: int) -> None:
        index, num = int(self.ids_E.searchsorted(token_id)), self._num
        if index == num or self._ids[index] != token_id:
            if num == len(self._ids):
                self._ids = np.resize(self._ids, 2 * num + 16)
                self._counts = np.resize(self._counts, 2 * num + 16)
            for array in (self._ids, self._counts):
                array[index + 1 : num + 1] = array[index:num]
            self._ids[index], self._counts[index] = token_id, 0
            self._num += 1
        self._counts[index] += 1


class _BadWords:
    """Tracks the output to ban the last tokens of words that it must not contain."""

    def __init__(self, words: Sequence[Sequence[int]], output_ids: TokenIds) -> None:
        self._always = [word[-1] for word in words if len(word) == 1]
        self._after: dict[int, list[Sequence[int]]] = {}
        """Words of two or more tokens, by their last token but one."""
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append(word)
        self._output: list[int] = output_ids.tolist()

    def __copy__(self) -> "_BadWords":
        other = object.__new__(_BadWords)
        other._always, other._after, other._output = self._always, self._after, [*self._output]
        return other

    @property
    def follows_output(self) -> bool:
        """Whether the banned tokens depend on the output."""
        return bool(self._after)

    def add(self, token_id: int) -> None:
        self._output.append(token_id)

    def banned(self) -> list[int]:
        """The tokens that would complete a bad word at the end of the output."""
        if not self._output:
            return self._always
        words = self._after.get(self._output[-1], ())
        completed = [w[-1] for w in words if tuple(self._output[1 - len(w) :]) == tuple(w[:-1])]
        return self._always + completed


class _Thinking:
    """Tracks how much of the reasoning budget is left."""

    def __init__(self, budget: int, mark_ids: Sequence[int], output_ids: TokenIds) -> None:
        """``mark_ids``: the token that begins reasoning, unless the prompt has begun it, and the
        token that ends it."""
        self._begin_id = mark_ids[0] if len(mark_ids) > 1 else None
        self.end_id = mark_ids[-1]
        self.end_mask_W = _mask(np.array([self.end_id], np.int64))
        self._num_left = budget
        self._has_begun = self._begin_id is None
        self._has_ended = False
        for token_id in output_ids.tolist():
            self.add(token_id)

    @property
    def must_end(self) -> bool:
        """Whether the next token must end the reasoning."""
        return self._has_begun and not self._has_ended and self._num_left <= 0

    def add(self, token_id: int) -> None:
        if not self._has_begun:
            self._has_begun = token_id == self._begin_id
        elif token_id == self.end_id:
            self._has_ended = True
        else:
            self._num_left -= 1


def _has(mask_W: Ints, token_id: int) -> bool:
    word, bit = divmod(token_id, MASK_BITS)
    return word < len(mask_W) and bool(mask_W[word] >> bit & 1)


def _without(mask_W: Ints, token_ids: Longs) -> Ints:
    """``mask_W`` without ``token_ids``; unchanged if no token would be left."""
    token_ids = token_ids[token_ids < len(mask_W) * MASK_BITS]
    later_W = mask_W.copy()
    np.bitwise_and.at(
        later_W.view(np.uint32),
        token_ids // MASK_BITS,
        ~(np.uint32(1) << (token_ids % MASK_BITS).astype(np.uint32)),
    )
    return later_W if later_W.any() else mask_W


def _mask(token_ids: Longs) -> Ints:
    """A mask that allows ``token_ids``, with as many words as the greatest of them needs."""
    bits = np.zeros((int(token_ids.max()) // MASK_BITS + 1) * MASK_BITS, np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bias(bias_of: dict[int, float]) -> tuple[Longs, Floats] | None:
    """Token ids, ascending, and their biases; ``None`` if there is no token."""
    if not bias_of:
        return None
    ids = sorted(bias_of)
    return np.array(ids, np.int64), np.array([bias_of[token] for token in ids], np.float32)
