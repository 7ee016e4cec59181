"""The commit and the machine of a measurement, as result files state them."""

import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("cluster", "worker", "kernels", "proto", "router")
"""Folders of a checkout from which Quire is imported."""


def commit() -> str:
    """Ends in "+" where files differ from it; "unknown" outside of a checkout. Results are no part
    of what is measured."""
    changed = _git("status", "-s", "--", ".", ":(exclude)bench/results")
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


def cpu() -> str:
    """The processor's name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # git is not installed.
        return ""
    return done.stdout.strip()
