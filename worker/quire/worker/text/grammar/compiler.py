"""Compiles constraints to grammars for a tokenizer, with the library llguidance.

    Grammars   compiles, caches compiled grammars, and refuses what is not supported
    Grammar    makes a `Matcher` for each output

Compilation may take any time and memory, or crash the process. So each constraint is first checked
in a separate process (`grammar_process`): by the gateway that received it, which all engines that
run the request trust; without a gateway, by the engine. A matcher only depends on a grammar and an
output's tokens.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.errors import CheckpointError, ConstraintRefused
from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.gbnf_lark import lark_of
from quire.worker.text.grammar.json_schema import checked, checked_embedded, place_of
from quire.worker.text.grammar.kept import Kept
from quire.worker.text.grammar.lark import WHITESPACE, Lark
from quire.worker.text.grammar.mask_cost import MaskCost
from quire.worker.text.grammar.matcher import Matcher, Place, cut
from quire.worker.text.grammar.process import GrammarProcess
from quire.worker.text.grammar.recent import RecentSeconds
from quire.worker.text.grammar.structural_tag import written
from quire.worker.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # Imported when needed: most processes never get a constraint.
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_LIMITS: dict[str, Any] = {
    "max_items_in_row": 1_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
}
_FUEL, _FUEL_A_BYTE, _MAX_FUEL = 100_000, 15, 1_000_000
_SYMBOLS, _BYTES_A_SYMBOL, _MAX_GRAMMAR_SIZE = 5_000, 4, 500_000
"""llguidance's limits on compilation, which grow with the text. bench/results/structured.md shows
how close usual grammars come to them."""
_MAX_TENANTS = 1_024
"""Most tenants whose costs are remembered."""
_LLAMA_CPP = re.compile(r"^[ \t\r]*[\w-]+[ \t]*::=", re.MULTILINE)


class Grammar:
    """A compiled constraint of one tenant."""

    def __init__(self, start: "LLMatcher", num_words: int, cost: MaskCost) -> None:
        self._state = start
        self.cost = cost
        self.start = Place(num_words)

    def matcher(self, token_ids: Sequence[int] | TokenIds = ()) -> Matcher:
        """A matcher after ``token_ids``, with its mask ready."""
        matcher = Matcher(self._state.deep_copy(), self.start, self.cost)
        matcher.consume(token_ids)
        matcher.fill(is_slow=self.cost.is_slow)
        return matcher


class Grammars:
    """Compiles constraints for one tokenizer. Thread-safe."""

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """``load_tokenizer`` is called once, for the first compilation. Token ids are below
        ``vocab_size``; an output may end with any of ``eos_token_ids``."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._process: GrammarProcess | None = None
        self._special_tokens: Mapping[int, str] = {}
        self._loading = threading.Lock()
        self._kept: Kept[Grammar | str] = Kept()
        self._tenants: dict[str, RecentSeconds] = {}

    def compile(
        self, constraint: Constraint, *, tenant: str = "", is_checked: bool = True
    ) -> Grammar:
        """Compiles a constraint. Takes milliseconds; the first time, also the time to build a trie
        of the tokenizer. The result is cached for ``tenant`` only, so that no other tenant can find
        out that it was requested.

        ``is_checked``: a `GrammarProcess` has accepted it; otherwise this object's process must.

        Raises:
            ConstraintRefused: It is invalid, not supported or too expensive; or the model has no
                tokenizer or no end token.
        """
        found = self.kept(constraint, tenant=tenant)
        if found is None:
            began_s = time.thread_time()
            found = self._compile(constraint, self._cost_of(tenant), is_checked=is_checked)
            self._kept.put(tenant, constraint, found, took_s=time.thread_time() - began_s)
        if isinstance(found, str):
            raise ConstraintRefused(found)
        return found

    def check(self, constraint: Constraint) -> None:
        """Compiles without caching. Raises ConstraintRefused, as `compile` does."""
        found = self._compile(constraint, RecentSeconds())
        if isinstance(found, str):
            raise ConstraintRefused(found)

    def kept(self, constraint: Constraint, *, tenant: str = "") -> Grammar | str | None:
        """The cached grammar of ``constraint``, or the reason why it is refused, if compilation
        failed or its masks took too long; ``None`` if it is not cached."""
        found = self._kept.get(tenant, constraint)
        if isinstance(found, Grammar) and found.cost.is_spent:
            return _refusal(constraint, found.cost.error)
        return found

    def prepare(self) -> None:
        """Loads the tokenizer before the first compilation. Raises ValueError if it cannot."""
        self._get_tokenizer()

    def close(self) -> None:
        """Ends the process in which constraints are checked."""
        if self._process is not None:
            self._process.close()

    def _cost_of(self, tenant: str) -> RecentSeconds:
        with self._loading:
            if len(self._tenants) >= _MAX_TENANTS and tenant not in self._tenants:
                self._tenants.pop(next(iter(self._tenants)))
            return self._tenants.setdefault(tenant, RecentSeconds())

    def _compile(
        self, constraint: Constraint, tenant: RecentSeconds, *, is_checked: bool = True
    ) -> Grammar | str:
        from llguidance import LLMatcher

        try:
            tokenizer = self._get_tokenizer()
            if not is_checked and self._process is not None:
                self._process.check(constraint)
            source = _source(constraint, self._special_tokens)
            state = LLMatcher(tokenizer, source, log_level=0, limits=_limits(constraint.text))
        except ConstraintRefused as error:
            return str(error)
        except (ValueError, RecursionError) as error:
            return _refusal(constraint, str(error))
        if state.is_error():
            return _refusal(constraint, state.get_error())
        grammar = Grammar(state, -(-self._vocab_size // 32), MaskCost(tenant))
        reason = grammar.matcher().error
        return grammar if reason is None else _refusal(constraint, reason)

    def _get_tokenizer(self) -> "LLTokenizer":
        """The tokenizer for llguidance. Raises ValueError if the model has none that works."""
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
                self._special_tokens = loaded.special_tokens
                self._process = GrammarProcess(loaded, vocab_size=self._vocab_size)
            return self._tokenizer


def _source(constraint: Constraint, special_tokens: Mapping[int, str]) -> str:
    """The constraint in llguidance's form. Raises ValueError if it is invalid."""
    from llguidance import LLMatcher, regex_to_lark

    if constraint.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            checked(constraint.text),
            defaults={"whitespace_pattern": WHITESPACE},
            overrides={"lenient": False},  # Unsupported keywords are refused.
        )
    if constraint.kind == "regex":
        # Digits and letters are ASCII, as in JSON schemas.
        pattern = regex_to_lark(constraint.text, use_ascii="dw")
        return LLMatcher.grammar_from_lark(f"start: /{pattern}/")
    lark = constraint.text
    if constraint.kind == "structural_tag":
        lark = written(Lark(special_tokens), lark)
    elif _LLAMA_CPP.search(lark):
        lark = lark_of(lark)
    return LLMatcher.grammar_from_lark(checked_embedded(lark))


def _refusal(constraint: Constraint, error: str) -> str:
    where = place_of(constraint.text, error) if constraint.kind == "json_schema" else ""
    return f"structured_outputs={constraint.kind}{where}: {cut(error)}"


def _limits(text: str) -> "LLParserLimits":
    from llguidance import LLParserLimits

    num_bytes = len(text.encode())
    return LLParserLimits(
        **_LIMITS,
        initial_lexer_fuel=min(_FUEL + _FUEL_A_BYTE * num_bytes, _MAX_FUEL),
        max_grammar_size=min(_SYMBOLS + num_bytes // _BYTES_A_SYMBOL, _MAX_GRAMMAR_SIZE),
        verbose_errors=False,
    )
