"""Writes API keys from the command line to a file in the state folder that only its owner may
read."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from quire.cluster.deploy.kept_logs import state_folder
from quire.worker.api.errors import ConfigError


def kept_keys(keys: Sequence[str]) -> Path:
    """The path of the file, with one key per line. The same keys have the same file. Raises
    ConfigError: a key is empty, or has a space, after which the rest would be a tenant."""
    if any(not key or key.split() != [key] or key.startswith("#") for key in keys):
        raise ConfigError("--api-key: a key is empty, has a space, or begins with #")
    text = "\n".join(dict.fromkeys(keys)) + "\n"
    folder = state_folder() / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        part.touch(mode=0o600)
        part.write_text(text, encoding="utf-8")
        part.rename(file)
    return file
