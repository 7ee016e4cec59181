"""Statistics of an engine for gateways (on each frame), autoscaling and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """An engine's load, and its counters since the start."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    """Tokens of waiting and running requests to compute before they can decode; less hits."""
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_wasted_slots: int
    """Slots of KV in held blocks that no token fills yet: the tails of last blocks."""
    num_held_slots: int
    """``num_held_blocks * block_size``."""
    num_prompt_tokens: int
    """Counter, as are the next ones: of requests that began to run, once each."""
    num_hit_tokens: int
    """Those among them that were in the cache."""
    num_output_tokens: int
    num_preemptions: int
    num_drafted_tokens: int
    """Tokens that were guessed, beside few sequences."""
    num_accepted_tokens: int
    """Those of them that were right, and so cost no step of their own."""
    num_steps: int
    num_prefilled_tokens: int
    """Prompt tokens computed, those computed again after a preemption too."""
    num_full_step_tokens: int
    """Those among them of steps that left prompt tokens waiting: all that a step could do."""
    full_step_s: float
    """Time spent in those steps. A counter too."""
    adapters: tuple[str, ...] = ()
    """Digests of the adapters that are loaded."""
    max_adapters: int = 0
    """How many can be at a time; 0 where it takes none."""
    num_adapters: int = 0
    """Those that requests at hand name, which take turns where they are more."""
    num_adapter_loads: int = 0
    """Counter."""
    num_host_tokens: int = 0
    """Counter, as are all that follow: tokens whose KV came from host memory."""
    num_disk_tokens: int = 0
    disk_s: float = 0.0
    """Time that requests waited for it."""
    num_peer_tokens: int = 0
    """Tokens whose KV came from other groups."""
    peer_s: float = 0.0
    num_lent_tokens: int = 0
    """Tokens whose KV went to other groups."""
    num_corrupt_blocks: int = 0
    """Blocks whose bytes were not what they should have been, and that were thrown away."""
    num_failed_pulls: int = 0
    """Pulls that ended before their last block."""
