"""Writes grammars in Lark's syntax with llguidance's extensions."""

import json
import re
from collections.abc import Mapping
from typing import Any

ANYTHING = r"(.|\n)*"
WHITESPACE = r"[ \n\t]{0,40}"
"""Whitespace between two tokens of JSON. Without a limit, some models write spaces forever."""


class Lark:
    """Collects the rules of a grammar, each under one name.

    ``special_tokens``: texts by id. A grammar refers to them by id, since their text alone would
    match other tokens.
    """

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        self._ids = {text: token_id for token_id, text in special_tokens.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names: dict[str, str] = {}

    def written(self, start: str) -> str:
        rules = [f"{name}{definition}" for definition, name in self._names.items()]
        return "\n".join([f"start: {start}", *rules, ""])

    def rule(self, body: str, *, name: str | None = None) -> str:
        """Adds a rule and returns its name. ``name`` is needed if ``body`` refers to itself."""
        definition = f": {body}"
        return self._names.setdefault(definition, name) if name else self._named("r", definition)

    def terminal(self, body: str) -> str:
        return self._named("T", f": {body}")

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        parts, at = [], 0
        for found in self._special.finditer(text):
            parts += [text[at : found.start()], self._ids[found[0]]]
            at = found.end()
        parts.append(text[at:])
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part != ""
        )

    def json(self, schema: Any) -> str:
        if isinstance(schema, dict):
            given = schema.get("x-guidance")
            options = {
                "whitespace_pattern": WHITESPACE,
                **(given if isinstance(given, dict) else {}),
            }
            # Unsupported keywords are refused.
            schema = {**schema, "x-guidance": {**options, "lenient": False}}
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def until(self, marker: str) -> str:
        """An expression for any text up to and including the first ``marker``."""
        if marker in self._ids:
            return f"{self.terminal(f'/{ANYTHING}/')} {self.text(marker)}"
        return self._named("r", f"[lazy]: /{ANYTHING}{_regex(marker)}/")

    def until_line(self, marker: str) -> str:
        """An expression for any text without ``marker``, followed by ``marker`` at the beginning of
        a line."""
        end = _regex(marker)
        once = self.terminal(
            f"/{ANYTHING}\\n{end}/ & ~/{end}{ANYTHING}/ & ~/{ANYTHING}[^\\n]{end}{ANYTHING}/"
        )
        return self._named("r", f"[lazy]: {once}")

    def without(self, *markers: str) -> str:
        """A terminal for any text without ``markers``. No terminal matches special tokens."""
        texts = [_regex(marker) for marker in markers if marker not in self._ids]
        none = "".join(f" & ~/{ANYTHING}{text}{ANYTHING}/" for text in texts)
        return self.terminal(f"/{ANYTHING}/{none}")

    def _named(self, prefix: str, definition: str) -> str:
        return self._names.setdefault(definition, f"{prefix}{len(self._names)}")


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
