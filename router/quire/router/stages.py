"""Groups that only compute prompts, beside those that decode.

All groups of a model are alike. Which of them compute prompts follows from their names, so that all
gateways agree, and another one takes the place of a group that leaves. Such a group hands each
stream over, with its KV, after its first token. A prompt whose rest is short is computed where it
decodes: handing it over would cost more.
"""

import hashlib
from collections.abc import Iterable, Sequence

from quire.router.prefix_index.directory import GroupId

MIN_APART_TOKENS = 256
"""Prompts of which the decoding groups lack fewer tokens are not computed apart."""


class Stages:
    def __init__(self, *, num_prefill_groups: int) -> None:
        self._num_prefill_groups = num_prefill_groups
        self.prefill: frozenset[GroupId] = frozenset()
        """Groups that only compute prompts."""
        self.decode: frozenset[GroupId] = frozenset()
        """The others; empty where all groups do both."""

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
        """The groups that do not take a request, of which there may already be output
        (``has_tokens``). ``held``: blocks of its prompt that each of ``members`` has."""
        if not self.prefill or has_tokens:
            return self.prefill
        most = max(
            (num for name, num in zip(members, held, strict=True) if name in self.decode), default=0
        )
        is_short = num_prompt_tokens - most * block_size < MIN_APART_TOKENS
        return self.prefill if is_short else self.decode


def _place(group: GroupId) -> bytes:
    return hashlib.blake2b(group.encode(), digest_size=8).digest()
