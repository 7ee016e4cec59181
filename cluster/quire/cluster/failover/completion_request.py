"""What a completion is asked to do, and how long it tries."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.cluster.failover.resume import Blame, ResumeConfig
from quire.cluster.model_card import ModelCard
from quire.worker.hashing import BlockHash, TokenIds
from quire.worker.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionConfig:
    """How long and how often a gateway looks for a group for one completion."""

    group_wait_s: float = 5.0
    """How long a new one waits for a group where there is none."""
    resume_wait_s: float = 60.0
    """How long one that is under way waits until a group can take it: where all are full, and where
    all were lost and others start. Its client has tokens that would be lost."""
    max_refusals: int = 3
    """Groups with a full queue that a new completion is offered to."""
    retry_pause_s: float = 0.1
    """Until one that is under way asks groups again that could not take it."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One completion of one prompt, checked, tokenized and hashed."""

    request_id: str
    """Of no other completion of this gateway."""
    index: int
    """Which of the request's completions it is."""
    model: ModelCard
    prompt_token_ids: TokenIds
    hashes: Sequence[BlockHash]
    """Of the prompt's full blocks."""
    params: SamplingParams
    """``seed`` and ``max_tokens`` are set."""
    cache_salt: str
    arrival_s: float
    """On the completion's clock."""
    priority: int = 0
    """Less runs sooner."""
    client_id: str = ""
    """What the client calls the request."""
    explain_routing: bool = False
    """Tell the client of every candidate."""
    blame: Blame = field(default_factory=Blame)
    """Shared by all completions of the prompt."""
