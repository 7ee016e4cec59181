"""Reserves Ray resources for a replica group, and starts its ranks there.

A group on one node is one actor, which also reserves resources for its child processes. A group on
several nodes is a placement group with one bundle for each node, on different nodes. The replica is
in the first bundle, without resources of its own, with as many ranks as each other bundle has.
Serve makes the placement group, and removes it with the replica; Ray then ends all processes in it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from quire.cluster.config import GroupModel
from quire.cluster.group.native_code import compile_native_code
from quire.worker.model.facts import ModelFacts
from quire.worker.model.hub import fetch_checkpoint
from quire.worker.model.read_facts import model_facts
from quire.worker.rank.executor import make_executor
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError
from quire.worker.step.messages import Executor

OnStep = Callable[[str], object]


def placement_options(config: GroupModel, *, on_gpu: bool) -> dict[str, Any]:
    """The options for Ray of the groups' deployment.

    Raises:
        ConfigError: There is nothing to reserve on the nodes of a group.
    """
    nodes = config.nodes_per_group
    num_gpus = config.engine.tensor_parallel_size // nodes if on_gpu else 0
    num_cpus = config.cpus_per_group / nodes
    resources = {config.group_resource: 1.0} if config.group_resource else {}
    if nodes == 1:
        return {
            "ray_actor_options": {
                "num_cpus": num_cpus,
                "num_gpus": num_gpus,
                "resources": resources,
            }
        }
    bundle = {"CPU": num_cpus, "GPU": float(num_gpus), **resources}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    if not bundle:
        raise ConfigError(
            f"nodes_per_group={nodes}: Ray must reserve something on each node to place a group "
            "there; set cpus_per_group or group_resource"
        )
    return {
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundles": [bundle] * nodes,
        "placement_group_strategy": "STRICT_SPREAD",
    }


def transfers_kv(config: GroupModel, facts: ModelFacts) -> bool:
    """Whether the groups of this model fetch blocks from each other."""
    return config.transfers_kv and not facts.is_encoder


def start_ranks(
    config: GroupModel, on_step: OnStep = lambda _: None
) -> tuple[Executor, ModelFacts]:
    """Starts the ranks of one group, from its replica. ``on_step`` is called with the name of each
    step as it begins.

    Meanwhile a thread hashes the weights, by which gateways identify the model.

    Raises:
        ConfigError, CheckpointError, RankFailure: As `make_executor`.
    """
    on_step("model files")
    engine = replace(config.engine, model=fetch_checkpoint(config.engine.model))
    # Bad settings are refused before the weights are hashed.
    facts = model_facts(engine, with_fingerprint=False)
    engine = replace(engine, kv_transfer=transfers_kv(config, facts))
    on_step("native code")
    compile_native_code(device=engine.device)
    on_step("weights")
    with ThreadPoolExecutor(1, "quire-fingerprint") as thread:
        hashed = thread.submit(model_facts, engine)
        executor = _start_executor(config, engine)
        try:
            return executor, replace(hashed.result(), numerics=executor.numerics)
        except BaseException:
            executor.close()
            raise


def _start_executor(config: GroupModel, engine: EngineConfig) -> Executor:
    """Starts the ranks. ``engine`` has the model's directory on this node; other nodes have their
    own."""
    if config.nodes_per_group == 1:
        return make_executor(engine)[0]
    # Imported here, because groups on one node need nothing of Ray.
    import ray

    from quire.cluster.features.nodes.rank_actors import ActorStarter
    from quire.cluster.features.nodes.remote_ranks import RemoteRanks

    placement_group = ray.util.get_current_placement_group()
    assert placement_group is not None, "Serve places a replica in its placement group"
    return LockstepExecutor(
        config.engine,
        RemoteRanks(
            ActorStarter(placement_group, model=config.engine.model),
            num_nodes=config.nodes_per_group,
            host=ray.util.get_node_ip_address(),
        ),
    )
