"""Draws plans from a seed: sizes of caches, numbers of groups, and the kinds of faults.

Limits are drawn small, so that queues fill, blocks run out and buffers overflow within minutes.
"""

import random
from math import inf

from tests.sim.clients import Load
from tests.sim.cluster import ClusterPlan
from tests.sim.faults import KINDS, ChaosPlan
from tests.sim.model import StepCost
from tests.sim.network import NetworkConfig
from tests.sim.world import Plan

from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.router.config import RoutingConfig


def draw_plan(seed: int, *, length_s: float) -> Plan:
    """Draws a plan. Equal seeds give equal plans, whatever the length."""
    rng = random.Random(f"{seed} plan")
    num_groups = rng.choice([1, 2, 2, 3, 3, 4])
    max_num_seqs = rng.choice([2, 8, 16])
    step_s = rng.choice([0.02, 0.05, 0.1])
    mean_output = rng.choice([5, 20, 40])
    capacity = num_groups * max_num_seqs / (step_s * mean_output)  # Requests per second.
    num_gateways = rng.choice([1, 1, 2, 3])
    p_fault = rng.choice([0.15, 0.3, 0.6])
    return Plan(
        cluster=ClusterPlan(
            num_groups=num_groups,
            num_gateways=num_gateways,
            num_blocks=rng.choice([70, 100, 200, 1000]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=rng.choice([16, 64, 256]),
            max_num_waiting=rng.choice([2, 20, 1000, 1000]),
            cost=StepCost(step_s=step_s, token_s=0.0005),
            handover_s=rng.choice([0.0, 1.0, 20.0]),
            client=GroupClientConfig(
                silence_timeout_s=rng.choice([2.0, 5.0]),
                step_deadline_s=rng.choice([5.0, 20.0]),
                window_tokens=rng.choice([4, 128]),
            ),
            gateway=GatewayConfig(
                completion=CompletionConfig(group_wait_s=30.0),
                admission=AdmissionConfig(
                    max_queue_wait_s=rng.choice([0.5, 10.0, inf]),
                    min_queued_per_group=rng.choice([1, 2, 10]),
                    max_queued_requests=rng.choice([5, 1024]),
                ),
            ),
            routing=RoutingConfig(
                stale_after_s=30.0,
                num_prefill_groups=random.Random(f"{seed} stages").choice([0, 0, 1]),
            ),
            detect_s=rng.choice([1.0, 5.0]),
            start_s=rng.choice([1.0, 10.0]),
            news_s=rng.choice([0.1, 3.0]),
        ),
        network=NetworkConfig(
            max_latency_s=rng.choice([0.001, 0.02]), window=rng.choice([2, 16, 64])
        ),
        load=Load(
            rate=min(2.0, capacity * rng.choice([0.1, 0.3, 0.5, 3.0])),
            mean_output=mean_output,
            burst=rng.choice([0, 0, 30, 100]),
            num_documents=rng.choice([1, 4, 20]),
            p_slow=rng.choice([0.0, 0.2]),
            p_cancel=rng.choice([0.0, 0.2]),
            p_deadline=rng.choice([0.0, 0.2]),
            p_poison=rng.choice([0.0, 0.0, 0.01]),
            p_several=rng.choice([0.0, 0.2]),
            priorities=rng.choice([(0,), (-1, 0, 5)]),
        ),
        chaos=ChaosPlan(
            kinds=tuple(kind for kind in KINDS if rng.random() < p_fault),
            pause_s=rng.choice([5.0, 20.0, 60.0]),
            max_length_s=rng.choice([5.0, 40.0]),
            drain_s=rng.choice([2.0, 20.0]),
        ),
        length_s=length_s,
    )
