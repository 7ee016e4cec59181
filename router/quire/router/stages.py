"""Disaggregated prefill: chooses which groups only compute prompts and which decode.

All groups of a model are alike. A hash of their names decides which ones only prefill, so that all
gateways agree, and another group takes over when one leaves. A prefill group hands each stream
over, with its KV, after the first token. A prompt with a short uncached part is computed by the
group that decodes it, since handing it over would cost more.
"""

import hashlib
from collections.abc import Iterable, Sequence

from quire.router.prefix_index.directory import GroupId

MIN_APART_TOKENS = 256
"""A prompt with fewer uncached tokens at a decode group is not sent to a prefill group."""


class Stages:
    """The division of the groups into prefill and decode groups."""

    def __init__(self, *, num_prefill_groups: int) -> None:
        self._num_prefill_groups = num_prefill_groups
        self.prefill: frozenset[GroupId] = frozenset()
        """Groups that only compute prompts."""
        self.decode: frozenset[GroupId] = frozenset()
        """The others; empty if all groups do both."""

    def update(self, members: Iterable[GroupId]) -> None:
        names = sorted(members, key=_place)
        num = self._num_prefill_groups
        is_apart = 0 < num < len(names)
        self.prefill = frozenset(names[:num] if is_apart else ())
        self.decode = frozenset(names[num:] if is_apart else ())

    def others(
        self,
        *,
        has_tokens: bool,
        num_prompt_tokens: int,
        held: Sequence[int],
        members: Iterable[GroupId],
        block_size: int,
    ) -> frozenset[GroupId]:
        """The groups that must not take a request. ``has_tokens``: the request already has output.
        ``held``: leading blocks of its prompt that each of ``members`` has."""
        if not self.prefill or has_tokens:
            return self.prefill
        most = max(
            (num for name, num in zip(members, held, strict=True) if name in self.decode), default=0
        )
        is_short = num_prompt_tokens - most * block_size < MIN_APART_TOKENS
        return self.prefill if is_short else self.decode


def _place(group: GroupId) -> bytes:
    return hashlib.blake2b(group.encode(), digest_size=8).digest()
