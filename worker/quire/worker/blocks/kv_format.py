"""The layout of KV blocks outside the cache, in which tiers and groups exchange them.

    [layer][K, then V][KV head of the whole model][the block's tokens of that head]

Each rank copies its own heads, so that groups of any tensor-parallel degree can exchange blocks.
The layout of the tokens within a head is the kernels' own: every block's name covers the numerics,
which identify the kernels.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# X blocks outside the cache   C bytes of one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class KvFormat:
    """The shape of a block's bytes. It is equal wherever blocks have equal names."""

    num_layers: int
    num_kv_heads: int
    """KV heads of the whole model."""
    head_bytes: int
    """Bytes of K (or of V) of a block's tokens in one head of one layer."""
    block_size: int
    """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_bytes

    def difference(self, other: "KvFormat") -> str:
        """The first differing field with both values, such as ``num_layers=4, not 8``; empty if the
        formats are equal."""
        for field in fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            if own != others:
                return f"{field.name}={own}, not {others}"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSource:
    """Another group that holds blocks which a request needs."""

    group_id: str
    address: str
    token: str = ""
    certificate: str = ""
    """PEM; empty means no TLS."""
    num_blocks: int
    """Length in blocks of the beginning of the request's chain that the group holds."""
