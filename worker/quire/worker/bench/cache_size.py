"""Parses KV cache sizes that a user enters: 25%, 4096tokens, 500blocks, 64MiB, or plain bytes."""

import re
from dataclasses import dataclass
from typing import Literal

from quire.worker.request.errors import ConfigError

Unit = Literal["%", "tokens", "blocks", "bytes"]

_UNITS: dict[str, tuple[Unit, int]] = {
    "%": ("%", 1),
    "tokens": ("tokens", 1),
    "blocks": ("blocks", 1),
    "": ("bytes", 1),
    "MiB": ("bytes", 1 << 20),
    "GiB": ("bytes", 1 << 30),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """A size of the KV cache. 100 % means one slot for every token of the workload."""

    text: str
    """The size as the user entered it."""
    amount: float
    unit: Unit

    def num_blocks(self, *, block_size: int, token_bytes: int, workload_tokens: int) -> int:
        """The size in whole blocks, rounded up if it is a share of the workload."""
        if self.unit == "blocks":
            return int(self.amount)
        if self.unit == "bytes":
            return int(self.amount) // (token_bytes * block_size)
        tokens = self.amount
        if self.unit == "%":
            tokens = self.amount / 100 * workload_tokens
        return -int(-tokens // block_size)


def parse_cache_size(text: str) -> CacheSize:
    """Parses ``text``, a number and a unit.

    Raises:
        ConfigError: It is not a size, or not above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(
            f"cache size {text!r}: must be a share of the workload such as 25%, or a number of "
            "tokens, blocks, MiB, GiB, or (with no unit) bytes, above 0"
        )
    unit, factor = _UNITS[match[2]]
    return CacheSize(text=text.strip(), amount=float(match[1]) * factor, unit=unit)
