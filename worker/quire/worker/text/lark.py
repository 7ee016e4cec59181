"""Writes grammars in Lark's syntax with llguidance's extensions."""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.worker.text.json_schema import without_unknown_formats

ANYTHING = r"(.|\n)*"
WHITESPACE = r"[ \n\t]{0,40}"
"""Between two tokens of JSON. Without a bound some models write spaces for ever."""


class Lark:
    """Rules, and the names under which they are written once.

    ``special_tokens``: texts by id. They stand in a grammar by their ids, since their text alone is
    not them.
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
        """``name``: that by which ``body`` names itself."""
        definition = f": {body}"
        return self._names.setdefault(definition, name) if name else self._named("r", definition)

    def terminal(self, body: str) -> str:
        return self._named("T", f": {body}")

    def text(self, text: str) -> str:
        """This text."""
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
        schema = without_unknown_formats(schema)
        if isinstance(schema, dict):
            given = schema.get("x-guidance")
            options = {
                "whitespace_pattern": WHITESPACE,
                **(given if isinstance(given, dict) else {}),
            }
            # What is not supported is refused.
            schema = {**schema, "x-guidance": {**options, "lenient": False}}
        return self.rule(f"%json {json.dumps(schema, ensure_ascii=False)}")

    def until(self, marker: str) -> str:
        """Any text up to the first ``marker``, and it."""
        if marker in self._ids:
            return f"{self.terminal(f'/{ANYTHING}/')} {self.text(marker)}"
        return self._named("r", f"[lazy]: /{ANYTHING}{_regex(marker)}/")

    def until_line(self, marker: str) -> str:
        """Any text that ``marker`` is not in, and a line that begins with it, up to its end."""
        end = _regex(marker)
        once = self.terminal(
            f"/{ANYTHING}\\n{end}/ & ~/{end}{ANYTHING}/ & ~/{ANYTHING}[^\\n]{end}{ANYTHING}/"
        )
        return self._named("r", f"[lazy]: {once}")

    def without(self, *markers: str) -> str:
        """Any text without ``markers``; a special token is in none."""
        texts = [_regex(marker) for marker in markers if marker not in self._ids]
        none = "".join(f" & ~/{ANYTHING}{text}{ANYTHING}/" for text in texts)
        return self.terminal(f"/{ANYTHING}/{none}")

    def _named(self, prefix: str, definition: str) -> str:
        return self._names.setdefault(definition, f"{prefix}{len(self._names)}")


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
