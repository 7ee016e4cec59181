"""Limits on how long a completion looks for a group."""

from dataclasses import dataclass, field

from quire.cluster.failover.resume import ResumeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionConfig:
    """How long and how often a gateway looks for a group for one completion."""

    group_wait_s: float = 5.0
    """How long a new completion waits when there is no group."""
    resume_wait_s: float = 60.0
    """How long a completion that has tokens waits for a group, if all groups are full, or all were
    lost and others start. Its client would lose those tokens."""
    max_refusals: int = 3
    """Groups with a full queue that a new completion is offered to."""
    retry_pause_s: float = 0.1
    """Seconds until a completion under way asks groups again that could not take it."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
