"""What an engine has done for one request, for those who ask to be told."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Progress:
    """Written by the engine's thread as it goes, where a request has one; any thread may read it.

    Times are in seconds on `time.monotonic`.
    """

    scheduled_s: float | None = None
    """When it was first let into a step."""
    num_chunks: int = 0
    """Steps that computed parts of its prompt, or after a preemption of all its tokens."""
    num_prefilled_tokens: int = 0
    """Tokens in them."""
    num_preemptions: int = 0
