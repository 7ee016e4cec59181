"""Grammars in llama.cpp's syntax allow the texts that their rules describe, character by character.

The model of a grammar is the set of its short texts, built by joining those of its parts.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from quire.worker.text.grammar.gbnf import parse
from quire.worker.text.grammar.gbnf_lark import lark_of

ALPHABET = "ab0éè"  # The last two have the same first byte.
LONGEST = 4
Texts = frozenset[str]


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    """Tokens for each byte, and for pairs of the letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<end>", *letters, "ab", "b0", "ba", "0a", "aa", "00"]
    merges = [(token[0], token[1]) for token in tokens[-6:]]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return LLTokenizer(made.to_str(), eos_token=[0])


def accepts(tokenizer: LLTokenizer, grammar: str) -> Iterator[tuple[str, bool]]:
    """Each text of at most `LONGEST` letters, and whether it is a whole text of ``grammar``."""
    start = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark_of(grammar)), log_level=0)
    assert not start.is_error(), (grammar, lark_of(grammar), start.get_error())
    for length in range(LONGEST + 1):
        for letters in product(ALPHABET, repeat=length):
            state = start.deep_copy()
            text = "".join(letters)
            tokens = tokenizer.tokenize_str(text)
            taken = state.try_consume_tokens(tokens)
            yield text, taken == len(tokens) and state.is_accepting()


@dataclass
class Drawn:
    """A part of a grammar: its text, and how its texts follow from those of the rules."""

    written: str
    kind: str
    parts: tuple["Drawn", ...] = ()
    least: int = 0
    most: int | None = None
    letters: str = ""

    def texts(self, rules: dict[str, Texts]) -> Texts:
        if self.kind == "rule":
            return rules[self.written]
        if self.kind == "letters":
            return frozenset(self.letters)
        parts = [part.texts(rules) for part in self.parts]
        if self.kind == "choice":
            return frozenset().union(*parts)
        if self.kind == "sequence":
            found: Texts = frozenset({""})
            for part in parts:
                found = joined(found, part)
            return found
        found, power = frozenset(), frozenset({""})
        for number in range(LONGEST + self.least + 1 if self.most is None else self.most + 1):
            found |= power if number >= self.least else frozenset()
            power = joined(power, parts[0])
        return found


def joined(left: Texts, right: Texts) -> Texts:
    return frozenset(one + other for one in left for other in right if len(one + other) <= LONGEST)


def draw(rng: random.Random, names: list[str], depth: int) -> Drawn:
    kind = rng.choice(["letters", "text", "rule"] + ["sequence", "choice", "repeat"] * (depth > 0))
    if kind == "letters":
        letters = "".join(rng.sample(ALPHABET, rng.randrange(1, 4)))
        if rng.random() < 0.3:
            others = "".join(letter for letter in ALPHABET if letter not in letters)
            return Drawn(f"[^{letters}]", "letters", letters=others)
        return Drawn(f"[{letters}]", "letters", letters=letters)
    if kind == "text":
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(3)))
        each = tuple(Drawn("", "letters", letters=letter) for letter in text)
        return Drawn(f'"{text}"', "sequence", each)
    if kind == "rule":
        return Drawn(rng.choice(names), "rule")
    if kind == "repeat":
        part = draw(rng, names, depth - 1)
        least = rng.randrange(3)
        most = rng.choice([None, least, least + 1])
        sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
        times = sign or f"{{{least},{'' if most is None else most}}}"
        return Drawn(f"({part.written}){times}", "repeat", (part,), least, most)
    parts = tuple(draw(rng, names, depth - 1) for _ in range(rng.randrange(1, 4)))
    sign = " | " if kind == "choice" else " "
    return Drawn(f"({sign.join(part.written for part in parts)})", kind, parts)


def texts_of(rules: dict[str, Drawn]) -> Texts:
    found: dict[str, Texts] = dict.fromkeys(rules, frozenset())
    while True:
        new = {name: found[name] | rule.texts(found) for name, rule in rules.items()}
        if new == found:
            return found["root"]
        found = new


@pytest.mark.parametrize("seed", range(40))
def test_a_grammar_allows_the_texts_of_its_rules(tokenizer: LLTokenizer, seed: int) -> None:
    rng = random.Random(seed)
    rules: dict[str, Drawn] = {}
    while not texts_of(rules) if rules else True:  # Without texts there is nothing to allow.
        names = ["root", "A-b", "a_b", "start"][: rng.randrange(1, 5)]
        rules = {name: draw(rng, names, 3) for name in names}
    grammar = "\n".join(f"{name} ::= {rule.written}" for name, rule in rules.items())
    expected = texts_of(rules)
    for text, is_allowed in accepts(tokenizer, grammar):
        assert is_allowed == (text in expected), (grammar, text)


NUMBERS = 'root ::= n "0"\nn ::= [0-9]+'
"""A number whose last digit is not part of ``n``."""


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        (NUMBERS, ["00", "120"], ["0", "121"]),
        (f"{NUMBERS} | root", ["00", "120"], ["0", "121"]),  # A recursive one has more terminals.
        ('root ::= "if" s | w s\nw ::= [a-z]+\ns ::= "(" root? ")"', ["if()", "iff(if())"], ["if"]),
        (r'root ::= "\u00df\u000a\U0001F600\xe9"', ["ß\n\U0001f600é"], ["df"]),
        (r"root ::= [\u00e0-\u00ff\x41]", ["é", "ÿ", "A"], ["Ā", "ß"]),
        (r'root ::= [\]"/\\^-] "/" "\"" [^\n]', [']/"a', '-/"/', '^/"é'], ['a/"a', '"/"\n']),
        ('root ::= a-b a_b ws WS start\na-b ::= "1"\na_b ::= "2"\nws ::= "3"\n'
         'WS ::= "4"\nstart ::= "5"', ["12345"], ["11345", "12335"]),
        ('root ::= "a"{0} "b"{0,0} "c"{2}', ["cc"], ["acc", "bcc", "c"]),
        ('root ::= . "x"? # any "character"\n', ["\n", "/x"], ["", "ab"]),
        ('root ::=\n  "a" |\n  # or\n  "b"\n  | ("c"\n "d")', ["a", "b", "cd"], ["c"]),
        ('root ::= root "a" |', ["", "aaa"], ["b"]),
    ],
)  # fmt: skip
def test_a_grammar_is_about_characters(
    tokenizer: LLTokenizer, grammar: str, allowed: list[str], refused: list[str]
) -> None:
    start = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark_of(grammar)), log_level=0)
    for text in allowed + refused:
        state = start.deep_copy()
        tokens = tokenizer.tokenize_str(text)
        taken = state.try_consume_tokens(tokens)
        assert (taken == len(tokens) and state.is_accepting()) == (text in allowed), text


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ('root ::= "a"\n\nb ::= [z-a]', "line 3 at .*: the range 'z' to 'a' is empty"),
        ('root ::= "a"\nb ::= c', "line 2 at 'c': the rule 'c' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2 at .*defined twice"),
        ('root ::= ("a"\n | "b"', "line 1 at .*: this parenthesis is not closed"),
        ('root ::= "a', "line 1 at '\"a': this text or class is not closed"),
        (r'root ::= "\u12"', "line 1 at .*is no escape, or lacks digits"),
        (r'root ::= "\ud800"', "is no character of Unicode"),
        ('root ::= "a"{2,1}', "repeats at least 2 and at most 1 times"),
        ('root ::= "a"{9999999999}', "expected {m}, {m,} or {m,n}"),
        ("root ::= []", "a class of no characters"),
        ("root ::= <think>", "tokens are not supported"),
        ('root ::= "a" )', "line 1 at '\\)': expected the end of the rule"),
        ('root ::= "a"\n"b"', "line 2 at .*: expected the name of a rule"),
        ("a ::= [a]", "the grammar has no rule 'root'"),
        (f"root ::= {'(' * 60}", "more than 50 parentheses"),
    ],
)
def test_an_error_names_the_line_of_the_grammar(grammar: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse(grammar)


def test_terminals_are_as_long_as_the_lexer_allows() -> None:
    """Masks of large vocabularies exceed llguidance's limits if texts are read by character."""
    value = r'value ::= "\"" [^"]* "\"" ws | "[" ws (value ("," ws value)*)? "]" ws'
    lark = lark_of(f"root ::= value\n{value}\nws ::= [ ]{{0,9}}")
    assert r"/[\x{22}](?:[\x{0}-\x{21}\x{23}-\x{10ffff}])*[\x{22}](?:[\x{20}]){0,9}/" in lark
