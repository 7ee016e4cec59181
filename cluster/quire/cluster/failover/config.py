"""Limits on how long a completion looks for a group."""

from dataclasses import dataclass, field

from quire.cluster.failover.resume import ResumeConfig


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """How long and how often a gateway looks for a group for one completion."""

    group_wait_s: float = 60.0
    """How long a completion waits for a group, where all were lost and others start; one that has
    tokens, also where all are full, since its client would lose those tokens."""
    max_refusals: int = 3
    """Groups with a full queue that a new completion is offered to."""
    retry_pause_s: float = 0.1
    """Seconds until a completion under way asks groups again that could not take it."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
