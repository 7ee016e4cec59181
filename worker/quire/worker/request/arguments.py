"""A class decorator: an unknown argument raises an error that says what to use instead."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from quire.worker.request.errors import UnknownArgument

_CLOSE = 0.8
_Kind = TypeVar("_Kind", bound=type[Any])


def explains_arguments(others: Mapping[str, str]) -> Callable[[_Kind], _Kind]:
    """Decorates a class: its constructor raises `UnknownArgument` for an unknown argument name.
    ``others`` maps names of vLLM's arguments to the text of the message."""

    def decorated(kind: _Kind) -> _Kind:
        make: Any = kind.__init__
        known = [name for name in signature(make).parameters if name != "self"]
        names = frozenset(known)

        @wraps(make)
        def explained(self: Any, *args: Any, **named: Any) -> None:
            if not named.keys() <= names:
                name = next(each for each in named if each not in names)
                told = f"vLLM's {name} {others[name]}" if name in others else _told(name, known)
                raise UnknownArgument(f"{kind.__name__}({name}=…): {told}")
            make(self, *args, **named)

        kind.__init__ = explained
        return kind

    return decorated


def _told(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=_CLOSE)
    told = f"is {near[0]} meant?" if near else f"there are {', '.join(known)}"
    return f"there is no such argument; {told}"
