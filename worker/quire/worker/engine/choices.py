"""Which tokens may follow those of a sequence: changes to the logits before a token is sampled.

The base class is that of a request that changes none. Penalties, bans and constraints are parts'.
"""

from collections.abc import Sequence as Items

from quire.worker.step.sampling_batch import Edits


class Choices:
    """Stateless here; a subclass follows the output of one request."""

    follows_tokens = False
    """Whether `edits` depends on the tokens before, so that none of them may be in flight."""
    is_pending = False
    """Whether it is not known yet which tokens may follow, so that none can be sampled."""

    @property
    def is_slow(self) -> bool:
        """Whether it will take long to know that behind the tokens in flight."""
        return False

    def edits(self, num_output: int) -> Edits | None:
        """The changes for the token after ``num_output`` output tokens. Its arrays may be views,
        valid until the next `accept`."""
        return None

    def accept(self, token_id: int) -> None:
        """Adds the next known token of the output."""

    @property
    def forced(self) -> Items[int] | None:
        """The tokens of the only text that may follow, as far as they are known; ``None`` if no
        token may be drafted."""
        return ()

    def draft(self, token_ids: list[int], *, num_output: int) -> Items[Edits | None]:
        """The changes after each of ``token_ids``, if these follow ``num_output`` output tokens;
        fewer where a token may not follow the one before."""
        return [None] * len(token_ids)


PLAIN = Choices()
