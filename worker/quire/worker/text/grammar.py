"""What a constraint's text means: grammars compiled for a tokenizer, by the library llguidance.

    Grammars   compiles, keeps what was compiled, and says what is not supported
    Matcher    the place of one output in its grammar: which tokens may come next

Gateways compile to refuse, in a process of its own (`grammar_process`), and engines to match. The
limits here count work and not seconds: a grammar is refused on every machine or on none. Matchers
are made of a grammar and an output's tokens alone, wherever that output is continued.
"""

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from quire.worker.api.arrays import Ints
from quire.worker.api.errors import CheckpointError, InvalidRequest
from quire.worker.api.hashing import TokenIds
from quire.worker.api.structured import Constraint
from quire.worker.text.json_schema import check_schema, place_of
from quire.worker.text.lark import WHITESPACE, Lark
from quire.worker.text.lark_work import check_lark
from quire.worker.text.regex_work import check_regex
from quire.worker.text.structural_tag import written
from quire.worker.text.tokenizer import Tokenizer
from quire.worker.text.work import TOO_LONG

if TYPE_CHECKING:  # Imported where it is needed: most processes never see a constraint.
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

T = TypeVar("T")

# K masks   W words of 32 tokens

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
}
_FUEL, _FUEL_A_BYTE, _MAX_FUEL = 100_000, 15, 1_000_000
_SYMBOLS, _BYTES_A_SYMBOL, _MAX_GRAMMAR_SIZE = 5_000, 4, 500_000
"""llguidance's limits of compiling grow with the text. How near honest grammars come to them is in
bench/results/structured.md."""
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 8 * 2**20
"""Of grammars' texts; what is made of them takes some times as much."""
_MAX_ERROR_CHARS = 400
_MAX_THREADS = 8
_MAX_FORCED_WORDS = 16
"""Words of a mask with a bit, above which no text is forced: few tokens begin one text."""
_LLAMA_CPP = re.compile(r"^[ \t\r]*[\w-]+[ \t]*::=", re.MULTILINE)
_MAX_LLAMA_CPP_RULES = 400
"""Translating them takes as long as their number's square."""


class Grammar:
    """A compiled constraint."""

    def __init__(self, start: "LLMatcher", mask_W: Ints) -> None:
        self._start = start
        self._mask_W = mask_W

    def matcher(self, token_ids: Sequence[int] | TokenIds = ()) -> "Matcher":
        """The place behind ``token_ids``."""
        matcher = Matcher(self._start.deep_copy(), self._mask_W)
        if len(token_ids):
            matcher.consume(token_ids)
            fill_masks([matcher])
        return matcher


class Matcher:
    """Which tokens may follow an output."""

    def __init__(self, state: "LLMatcher", mask_W: Ints) -> None:
        self._state = state
        self.mask_W = mask_W
        """Bit ``t % 32`` of word ``t // 32`` allows token ``t``. End tokens are allowed where the
        output may end; where it must, nothing else is."""
        self.error: str | None = None
        """Why the output cannot go on: its next token would take more work than there may be."""

    def consume(self, token_ids: Sequence[int] | TokenIds) -> None:
        """Goes on behind tokens that were allowed; `fill_masks` must follow."""
        if self.error is None and not self._state.consume_tokens([int(each) for each in token_ids]):
            self.error = _cut(self._state.get_error())

    def forced(self) -> list[int]:
        """Tokens that must come next, as far as the tokenizer alone decides how their text is cut
        into tokens: a model may cut it otherwise. Often none."""
        if self.error is not None or np.count_nonzero(self.mask_W) > _MAX_FORCED_WORDS:
            return []
        forced: list[int] = self._state.deep_copy().compute_ff_tokens()
        return forced

    def masks_behind(self, token_ids: Sequence[int]) -> list[Ints]:
        """What is allowed behind each of ``token_ids``, as far as these are allowed themselves.
        This place stays where it is."""
        ahead = Matcher(self._state.deep_copy(), self.mask_W)
        masks = []
        for token_id in token_ids:
            ahead.consume((token_id,))
            fill_masks([ahead])
            if ahead.error is not None:
                break
            masks.append(ahead.mask_W)
        return masks

    def _fill(self, mask_W: Ints) -> None:
        self.mask_W = mask_W
        if self._state.is_error():
            self.error = _cut(self._state.get_error())


def fill_masks(matchers: Sequence[Matcher]) -> None:
    """Computes the masks of matchers that have gone on; sets their errors."""
    alive = [matcher for matcher in matchers if matcher.error is None]
    if not alive:
        return
    mask_KW = np.zeros((len(alive), len(alive[0].mask_W)), np.int32)
    row_bytes = mask_KW.shape[1] * mask_KW.itemsize
    if len(alive) == 1:
        alive[0]._state.unsafe_compute_mask_ptr(mask_KW.ctypes.data, row_bytes)
    else:
        states = [(matcher._state, row) for row, matcher in enumerate(alive)]
        _executor().unsafe_compute_mask_ptr(states, mask_KW.ctypes.data, row_bytes, len(alive))
    for matcher, mask_W in zip(alive, mask_KW, strict=True):
        matcher._fill(mask_W)


class Kept(Generic[T]):
    """What came of the constraints that were asked for last. May be used from several threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Constraint, T] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, constraint: Constraint) -> T | None:
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
            return self._kept.get(constraint)

    def put(self, constraint: Constraint, found: T) -> None:
        with self._lock:
            if constraint not in self._kept:
                self._num_bytes += len(constraint.text)
            self._kept[constraint] = found
            while len(self._kept) > _MAX_KEPT or self._num_bytes > _MAX_KEPT_BYTES:
                oldest, _ = self._kept.popitem(last=False)
                self._num_bytes -= len(oldest.text)


class Grammars:
    """Compiles constraints for one tokenizer. May be used from several threads."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """``load_tokenizer`` is called once, by the first that compiles. Token ids are below
        ``vocab_size``; an output may end by any of ``eos_token_ids``."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._special_tokens: Mapping[int, str] = {}
        self._loading = threading.Lock()
        self._kept: Kept[Grammar | str] = Kept()

    def compile(self, constraint: Constraint) -> Grammar:
        """Takes milliseconds, and the first time as long as making a trie of the tokenizer.

        Raises:
            InvalidRequest: It means nothing, is not supported or takes too much work; or the model
                has no tokenizer or no end token.
        """
        found = self.kept(constraint)
        if found is None:
            found = self._compile(constraint)
            self._kept.put(constraint, found)
        if isinstance(found, str):
            raise InvalidRequest(found)
        return found

    def kept(self, constraint: Constraint) -> Grammar | str | None:
        """What came of ``constraint`` when it was compiled, perhaps why it is refused; ``None``
        where that is not known."""
        return self._kept.get(constraint)

    def prepare(self) -> None:
        """Loads the tokenizer, which the first to compile would do. Raises ValueError."""
        self._get_tokenizer()

    def _compile(self, constraint: Constraint) -> Grammar | str:
        from llguidance import LLMatcher

        try:
            tokenizer = self._get_tokenizer()
            source = _source(constraint, self._special_tokens)
            state = LLMatcher(tokenizer, source, log_level=0, limits=_limits(constraint.text))
        except (ValueError, RecursionError) as error:
            return _refusal(constraint, str(error))
        if state.is_error():
            return _refusal(constraint, state.get_error())
        start = Matcher(state, np.zeros(-(-self._vocab_size // 32), np.int32))
        fill_masks([start])
        if start.error is not None:
            return _refusal(constraint, start.error)
        return Grammar(state, start.mask_W)

    def _get_tokenizer(self) -> "LLTokenizer":
        """Raises ValueError."""
        from llguidance import LLTokenizer

        with self._loading:
            if self._tokenizer is None:
                try:
                    loaded = self._load_tokenizer()
                    text = loaded.to_json()
                except CheckpointError as error:
                    raise ValueError(f"the model has no tokenizer: {error}") from None
                if not self._eos_token_ids:
                    raise ValueError("the model has no end token, so that no output would end")
                self._tokenizer = LLTokenizer(
                    text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
                self._special_tokens = loaded.special_tokens()
            return self._tokenizer


def _source(constraint: Constraint, special_tokens: Mapping[int, str]) -> str:
    """The grammar in llguidance's form. Raises ValueError."""
    from llguidance import LLMatcher, regex_to_lark

    if constraint.kind == "json_schema":
        check_schema(constraint.text)
        return LLMatcher.grammar_from_json_schema(
            constraint.text,
            defaults={"whitespace_pattern": WHITESPACE},
            overrides={"lenient": False},  # What is not supported is refused.
        )
    if constraint.kind == "regex":
        check_regex(constraint.text)
        # Digits and letters are those of ASCII, as in JSON schemas.
        pattern = regex_to_lark(constraint.text, use_ascii="dw")
        return LLMatcher.grammar_from_lark(f"start: /{pattern}/")
    lark = constraint.text
    if constraint.kind == "structural_tag":
        lark = written(Lark(special_tokens), lark)
    elif _LLAMA_CPP.search(lark):
        lark = _translated(lark)
    check_lark(lark, is_ours=constraint.kind == "structural_tag")
    return LLMatcher.grammar_from_lark(lark)


def _translated(grammar: str) -> str:
    """A grammar in llama.cpp's syntax, in Lark's. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    num_rules = grammar.count("::=")
    if num_rules > _MAX_LLAMA_CPP_RULES:
        raise ValueError(f"{num_rules} rules: {TOO_LONG}: at most {_MAX_LLAMA_CPP_RULES}")
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # Besides its own error it raises IndexError and plain ones.
        raise ValueError(str(error)) from None


def _refusal(constraint: Constraint, error: str) -> str:
    where = place_of(constraint.text, error) if constraint.kind == "json_schema" else ""
    return f"structured_outputs={constraint.kind}{where}: {_cut(error)}"


def _cut(error: str) -> str:
    error = error.removesuffix("<non-verbose/>").strip()
    return error if len(error) <= _MAX_ERROR_CHARS else f"{error[:_MAX_ERROR_CHARS]}…"


def _limits(text: str) -> "LLParserLimits":
    from llguidance import LLParserLimits

    num_bytes = len(text.encode())
    return LLParserLimits(
        **_LIMITS,
        initial_lexer_fuel=min(_FUEL + _FUEL_A_BYTE * num_bytes, _MAX_FUEL),
        max_grammar_size=min(_SYMBOLS + num_bytes // _BYTES_A_SYMBOL, _MAX_GRAMMAR_SIZE),
        verbose_errors=False,
    )


@cache
def _executor() -> "LLExecutor":
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(_MAX_THREADS, os.cpu_count() or 1))
