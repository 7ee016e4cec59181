"""Reads the code blocks of documentation pages and prepares an environment that runs them."""

import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MODULES = {"quire": "quire", "ray": "ray.scripts.scripts", "pip": "pip"}


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: str, *languages: str) -> list[Block]:
    """The fenced code blocks of a page in any of ``languages``, in the order of the page."""
    found = (Block(*each) for each in _FENCED.findall((ROOT / page).read_text()))
    return [each for each in found if each.language in languages]


def environment(folder: Path) -> dict[str, str]:
    """Variables of a shell that runs this Python's commands, by scripts written to ``folder``."""
    for name, module in _MODULES.items():
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
