"""Rules for the values of parameters: the allowed values, and how they are converted and stored.

A dataclass declares them in its annotations, such as ``Annotated[float, real(0, 1)]``.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from quire.worker.request.errors import InvalidRequest

_IDS = "token ids, 0 or more"
_MAX_SHOWN_CHARS = 200
_MAX_DIGITS = 10


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule of a field. The default accepts any value."""

    types: tuple[Any, ...] = ()
    """The field's type, or the members of its union."""
    over_http: bool = True
    """Whether HTTP bodies have the field."""
    convert: Callable[[str, Any], Any] = lambda name, value: value
    """Takes the field's name and a value; returns the value to store. Raises InvalidRequest."""
    none: object = None
    """The stored form of ``None``, if the field's type allows ``None``."""
    token_ids: Callable[[Any], Iterable[int]] | None = None
    """Returns the token ids in a stored value; the vocabulary must contain them."""
    allowed: str = ""
    """The allowed values, in words; empty: any value of the type."""

    def kept(self, name: str, value: Any) -> Any:
        """Converts a value with ``convert``, but ``None`` to ``none`` if the type allows it."""
        if value is None and NoneType in self.types:
            return self.none
        return self.convert(name, value)


def rules_of(declared: type) -> dict[str, Rule]:
    """The rules of a dataclass's fields, by name."""
    rules = {}
    for name, hint in get_type_hints(declared, include_extras=True).items():
        kind, rule = get_args(hint) if get_origin(hint) is Annotated else (hint, Rule())
        types = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        rules[name] = replace(rule, types=types)
    return rules


def _number(
    types: Any, low: float, high: float = math.inf, *, but: float | None = None, said: str = ""
) -> Rule:
    """A number from ``low`` to ``high``, except ``but``; ``said`` describes these in words."""
    said = said or (f"{low} or more" if high == math.inf else f"{low} to {high}")

    def convert(name: str, value: Any) -> Any:
        if not _is_in(value, types, low, high) or value in (but, math.inf):
            raise _out_of_range(name, value, said)
        return value

    return Rule(convert=convert, allowed=said)


real = partial(_number, (int, float))
whole = partial(_number, int)


def strings(most: int, *, but: str, max_chars: float = math.inf) -> Rule:
    """One string or several, stored as a tuple. ``but`` says which strings are refused: "empty"
    ones, or also "blank" ones (only spaces)."""
    length = "" if max_chars == math.inf else f" of {max_chars} characters or fewer"
    allowed = f"at most {most} strings{length}, none {but}"

    def is_string(each: object) -> bool:
        if not isinstance(each, str) or len(each) > max_chars:
            return False
        return (each.strip() if but == "blank" else each) != ""

    def convert(name: str, value: Any) -> tuple[Any, ...]:
        listed = _listed(name, [value] if isinstance(value, str) else value, allowed)
        if len(listed) > most or not all(map(is_string, listed)):
            raise _out_of_range(name, listed, allowed)
        return listed

    return Rule(convert=convert, none=(), allowed=allowed)


def ids(most: int, *, over_http: bool = True) -> Rule:
    """Token ids, stored as a tuple."""

    def convert(name: str, value: Any) -> tuple[Any, ...]:
        listed = _listed(name, value, _IDS)
        if not all(map(_is_id, listed)):
            raise _out_of_range(name, listed, _IDS)
        if len(listed) > most:
            raise InvalidRequest(f"{name} has {len(listed)}: at most {most}", param=name)
        return listed

    allowed = f"at most {most} {_IDS}"
    return Rule(convert=convert, none=(), token_ids=iter, over_http=over_http, allowed=allowed)


def id_lists(most: int, most_ids: int, *, over_http: bool = True) -> Rule:
    """Nonempty lists of token ids, stored as a tuple of tuples; at most ``most_ids`` ids in all."""
    allowed = f"at most {most} lists of token ids, none empty, of {most_ids} tokens together"

    def convert(name: str, value: Any) -> tuple[Any, ...]:
        lists = tuple(_listed(name, each, allowed) for each in _listed(name, value, allowed))
        every = [*chain.from_iterable(lists)]
        if len(lists) > most or len(every) > most_ids or not all([*lists, *map(_is_id, every)]):
            raise _out_of_range(name, lists, allowed)
        return lists

    return Rule(
        convert=convert,
        none=(),
        token_ids=chain.from_iterable,
        over_http=over_http,
        allowed=allowed,
    )


def biases(most: int, *, limit: float) -> Rule:
    """Numbers from ``-limit`` to ``limit`` by token id. An id may be a decimal string."""

    def convert(name: str, value: Any) -> dict[int, float] | None:
        if not isinstance(value, Mapping):
            raise _out_of_range(name, value, "token ids and their biases")
        if len(value) > most:
            raise InvalidRequest(f"{name} has {len(value)} tokens: at most {most}", param=name)
        for token, bias in value.items():
            is_id = _is_decimal(token) if isinstance(token, str) else _is_id(token)
            if not is_id or int(token) >= 2**31:
                raise _out_of_range(name, token, _IDS)
            if not _is_in(bias, (int, float), -limit, limit):
                raise _out_of_range(name, {token: bias}, f"biases from {-limit} to {limit}")
        return {int(token): float(bias) for token, bias in value.items()} or None

    allowed = f"at most {most} token ids with biases from {-limit} to {limit}"
    return Rule(convert=convert, token_ids=lambda kept: kept or (), allowed=allowed)


def _out_of_range(name: str, value: object, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name}={shown(value)} is out of range: {allowed}", param=name)


def shown(value: object) -> str:
    """``value`` as it appears in a message: its repr, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of thousands of digits.
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}…"


def _is_in(value: Any, types: Any, low: float, high: float) -> bool:
    return isinstance(value, types) and not isinstance(value, bool) and low <= value <= high


def _is_id(value: object) -> bool:
    return _is_in(value, int, 0, math.inf)


def _is_decimal(text: str) -> bool:
    """Whether ``text`` is a number that `int` takes: it refuses thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _listed(name: str, value: Any, allowed: str) -> tuple[Any, ...]:
    try:
        return tuple(value or ())
    except TypeError:
        raise _out_of_range(name, value, allowed) from None
