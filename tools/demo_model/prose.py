"""Plain paragraphs from documentation that is in the public domain."""

import gzip
import html
import re
from pathlib import Path

_UNWANTED = re.compile(
    r"fuck|shit|\bsex|\bass\b|\bcunt|nazi|rape|pornograph|orgasm|penis|\bdrug|\bcrap|bitch|\btit",
    re.IGNORECASE,
)


def _tidy(text: str) -> str:
    text = text.translate(str.maketrans("‘’“”–", "''\"\"-"))
    return re.sub(r"\s+", " ", text).strip()


def _is_prose(text: str) -> bool:
    """Whether this is a paragraph of sentences, not a table, a listing or code."""
    letters = sum(c.isalpha() or c in " ,." for c in text)
    return (
        80 <= len(text) <= 900
        and letters / len(text) > 0.94
        and text[0].isupper()
        and text[-1] in ".!?"
        and not _UNWANTED.search(text)
    )


def sqlite_paragraphs(package: Path) -> list[str]:
    """The paragraphs of the SQLite documentation."""
    found: dict[str, None] = {}
    for page in sorted((package / "usr/share/doc/sqlite3").rglob("*.html")):
        source = page.read_text(errors="replace")
        source = re.sub(r"(?s)<(script|style|pre|table|svg).*?</\1>", " ", source)
        for part in re.split(r"</?(?:p|li|ul|ol|h\d|div|blockquote|dd|dt|dl)\b[^>]*>", source):
            text = _tidy(html.unescape(re.sub(r"<[^>]*>", "", part)))
            if _is_prose(text):
                found[text] = None
    return list(found)


def jargon_paragraphs(package: Path) -> list[str]:
    """The paragraphs of the Jargon File."""
    source = gzip.decompress((package / "usr/share/dictd/jargon.dict.dz").read_bytes()).decode()
    found: dict[str, None] = {}
    for part in re.split(r"\n\s*\n", source):
        text = _tidy(re.sub(r"[{}]|\[techspeak\]", "", part))
        text = re.sub(r"^\d+\. ", "", text)
        if _is_prose(text):
            found[text] = None
    return list(found)


def element_paragraphs(package: Path) -> list[str]:
    """One paragraph for each chemical element."""
    packed = gzip.decompress((package / "usr/share/dictd/elements.dict.dz").read_bytes())
    source = packed.decode("latin-1")
    found: list[str] = []
    for entry in re.split(r"\n\s*\n", source):
        match = re.match(r"(?s)\s*(\w+)\nSymbol: .*?Atomic weight:[^\n]*\n(.*)", entry)
        if match:
            text = _tidy(f"{match[1].capitalize()}: {match[2]}")
            if 80 <= len(text) <= 900 and text[-1] == ".":
                found.append(text)
    return found
