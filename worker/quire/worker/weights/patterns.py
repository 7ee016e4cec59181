"""Regular expressions that come with a model's or an adapter's files.

RE2 matches them in time linear in the name's length, whatever the pattern: with Python's `re`, a
pattern of a hundred characters can take hours and stop every thread meanwhile. RE2 has neither
look-around nor back references; patterns with these are refused.
"""

import re
from functools import lru_cache

MAX_CHARS = 1000
_MAX_BYTES = 1 << 20  # Memory of each compiled pattern.


class Pattern:
    """A regular expression of at most `MAX_CHARS` characters, in the syntax that Python's `re` and
    RE2 have in common. ``^`` and ``$`` are the ends of the name.

    Raises:
        ValueError: It is no such expression, or takes too much memory.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARS:
            raise ValueError(f"{len(text)} characters: at most {MAX_CHARS}")
        import re2  # A machine without it runs models whose files have no patterns.

        options = re2.Options()
        options.log_errors = False
        options.max_mem = _MAX_BYTES
        try:
            self._compiled = re2.compile(text, options)
        except re2.error as error:
            raise ValueError(error.args[0].decode(errors="replace")) from None

    def matches(self, name: str) -> bool:
        """Whether ``name`` begins with a match."""
        return self._compiled.match(name) is not None


@lru_cache(maxsize=1024)
def pattern(text: str) -> Pattern:
    """`Pattern`, kept for the next use."""
    return Pattern(text)


def of_wildcards(text: str) -> str:
    """The expression for names in which each ``*`` of ``text`` stands for any text."""
    return ".*".join(map(re.escape, text.split("*"))) + "$"
