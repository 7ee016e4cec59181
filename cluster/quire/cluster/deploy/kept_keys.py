"""Keeps the API keys of the command line, while they are served, in a file for the gateways.

The file is in the state folder and has only hashes of the keys. Its name is the id of the process
that serves, so that a later start removes what a killed one left behind.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.cluster.deploy.kept_logs import is_running, state_folder
from quire.worker.request.errors import ConfigError


def kept_keys_file(keys: Sequence[str]) -> Path:
    """The path that `kept_keys` writes to in this process. Raises ConfigError: a key is empty or
    has a space, or there is no home directory."""
    if any(not key or key.split() != [key] or key.startswith("#") for key in keys):
        raise ConfigError("--api-key: a key is empty, has a space, or begins with #")
    try:
        return state_folder() / "keys" / str(os.getpid())
    except RuntimeError as error:
        raise _refusal(error) from error


@contextlib.contextmanager
def kept_keys(keys: Sequence[str] | None) -> Iterator[None]:
    """Writes the file before the block and removes it after; does nothing without ``keys``. Raises
    ConfigError: it cannot be written."""
    if not keys:
        yield
        return
    from quire.cluster.features.tenants.keys_file import (
        hashed_file,  # Takes a second, for few starts.
    )

    file = kept_keys_file(keys)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for other in file.parent.iterdir():
            if not is_running(other.name):
                other.unlink(missing_ok=True)
        file.unlink(missing_ok=True)  # An earlier process with this id left it.
        file.touch(mode=0o600)
        file.write_text(hashed_file(keys), encoding="utf-8")
    except OSError as error:
        raise _refusal(error) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def _refusal(error: Exception) -> ConfigError:
    return ConfigError(
        f"--api-key: no folder to keep the keys' hashes in: {error}; QUIRE_STATE_DIR names another"
    )
