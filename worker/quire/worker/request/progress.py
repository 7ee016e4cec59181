"""A record of what an engine has done for one request, for callers that want it."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Progress:
    """The engine's thread updates it for a request that has one; any thread may read it.

    Times are in seconds of `time.monotonic`.
    """

    scheduled_s: float | None = None
    """When the request was first scheduled in a step."""
    num_chunks: int = 0
    """Steps that computed a chunk of its prompt, or of all its tokens after a preemption."""
    num_prefilled_tokens: int = 0
    """Tokens in these chunks."""
    num_preemptions: int = 0
