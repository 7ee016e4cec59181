"""Statistics of an engine, for gateways (in each frame), autoscaling and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """An engine's load, and its counters since its start."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    """Prefill tokens left to compute for waiting and running requests, without cache hits."""
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_wasted_slots: int
    """KV slots in held blocks that hold no token yet: the tails of last blocks."""
    num_held_slots: int
    """``num_held_blocks * block_size``."""
    num_prompt_tokens: int
    """Counter, as are the next ones: prompt tokens of requests that began to run, each once."""
    num_hit_tokens: int
    """Those of ``num_prompt_tokens`` whose KV was in the cache."""
    num_output_tokens: int
    num_preemptions: int
    num_steps: int
    num_prefilled_tokens: int
    """Prompt tokens computed, including recomputation after a preemption."""
    num_full_step_tokens: int
    """Prompt tokens computed in full steps: those that left prompt tokens waiting."""
    full_step_s: float
    """Seconds spent in full steps. A counter too."""
    num_drafted_tokens: int = 0
    """Draft tokens that speculation proposed. A counter, as the next one."""
    num_accepted_tokens: int = 0
    """Draft tokens that were accepted, and so cost no step of their own."""
    adapters: tuple[str, ...] = ()
    """Digests of the adapters that are loaded."""
    max_adapters: int = 0
    """Adapters that can be loaded at the same time; 0 where adapters are not enabled."""
    num_adapters: int = 0
    """Adapters of current requests; if there are more than ``max_adapters``, they take turns."""
    num_adapter_loads: int = 0
    """Counter of adapters loaded into a slot."""
    num_host_tokens: int = 0
    """Counter, as are all that follow: tokens whose KV came from host memory."""
    num_disk_tokens: int = 0
    disk_s: float = 0.0
    """Seconds that requests waited for KV from disk."""
    num_peer_tokens: int = 0
    """Tokens whose KV came from other groups."""
    peer_s: float = 0.0
    num_lent_tokens: int = 0
    """Tokens whose KV went to other groups."""
    num_corrupt_blocks: int = 0
    """Blocks that were discarded because their checksum did not match."""
    num_failed_pulls: int = 0
    """Pulls that ended before their last block."""
