"""The choices of a request with a constraint, whose grammar says which tokens may follow."""

from quire.worker.engine.choices import Choices
from quire.worker.parts.constraints.edits import RequestEdits
from quire.worker.step.sampling_batch import Edits
from quire.worker.text.grammar.matcher import Matcher


class Constrained(Choices):
    """``matcher`` is at the end of the output; ``others`` are the request's other changes."""

    follows_tokens = True

    def __init__(self, others: RequestEdits, matcher: Matcher) -> None:
        self._others = others
        self.matcher = matcher
        self.is_pending = False
        """Whether the mask of tokens that may follow is not ready."""

    @property
    def is_slow(self) -> bool:
        """Whether its masks are slow to compute: those of tokens in flight would be late."""
        return self.matcher.cost.is_slow

    def edits(self, num_output: int) -> Edits | None:
        return self._others.edits(num_output)

    def accept(self, token_id: int) -> None:
        self._others.accept(token_id)
        self.matcher.consume((token_id,))

    def draft(self, token_ids: list[int], *, num_output: int) -> list[Edits | None]:
        masks = self.matcher.masks_behind(token_ids)
        return self._others.behind(token_ids, num_output=num_output, masks=masks)

    @property
    def forced(self) -> list[int] | None:
        # Masks of draft tokens are computed within the step.
        return self.matcher.forced() if self.matcher.cost.is_trusted else None

    def take_mask(self, *, num_output: int) -> str | None:
        """Makes the tokens that the constraint allows after ``num_output`` tokens the only ones
        that may follow. Returns why there are none; ``None`` if there are some.

        The matcher must be ready, or its grammar's CPU time spent.
        """
        if self.matcher.cost.is_spent:
            return self.matcher.cost.error
        if self.matcher.error is not None:
            return self.matcher.error
        if not self._others.allow(self.matcher.mask_W, num_output=num_output):
            return "none of the tokens that it allows next is among allowed_token_ids"
        return None
