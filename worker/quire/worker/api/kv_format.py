"""How blocks of KV lie outside the cache, where tiers and groups exchange them; and who has some.

    [layer][K, then V][KV head of the whole model][the block's tokens of that head]

A rank has some of the heads, so that groups of any tensor-parallel degree exchange blocks. How the
tokens of one head lie is the kernels' affair: numerics, which are in the name of every block, tell
kernels apart.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# X blocks outside the cache   C bytes of one of them


@dataclass(frozen=True, kw_only=True, slots=True)
class KvFormat:
    """The shape of a block's bytes; equal wherever blocks of one name are."""

    num_layers: int
    num_kv_heads: int
    """KV heads of the whole model."""
    head_bytes: int
    """K, or V, of a block's tokens in one head of one layer."""
    block_size: int
    """Tokens of a block."""

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_bytes

    def difference(self, other: "KvFormat") -> str:
        """The first field that differs with both values, such as ``num_layers=4, not 8``; empty
        where the two are equal."""
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
    """PEM; empty is without TLS."""
    num_blocks: int
    """Blocks of the request's chain that it holds, from the first on."""
