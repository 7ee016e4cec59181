from math import inf
from pathlib import Path

import pytest

from quire import demo_model
from quire.cluster.settings import config_from
from quire.router.config import RoutingConfig
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError


def test_fields_are_read_by_name() -> None:
    config = config_from(
        {
            "engine": {"model": "/models/llama", "block_size": 32, "tensor_parallel_size": 2},
            "routing": {"policy": "least_loaded", "use_directory": False},
            "num_groups": 3,
            "tls_certificate": "/tls/tls.crt",
            "tls_key": "/tls/tls.key",
        }
    )
    assert config.engine.model == Path("/models/llama")
    assert config.engine.block_size == 32
    assert config.num_groups == 3
    assert config.routing == RoutingConfig(policy="least_loaded", use_directory=False)
    assert config.tls_key == Path("/tls/tls.key")


def test_autoscaling_is_read_by_name() -> None:
    config = config_from({"autoscaling": {"min_groups": 0, "max_groups": 4, "target_ttft_s": 1}})
    assert config.autoscaling is not None
    assert (config.min_groups, config.max_groups) == (0, 4)
    assert config.autoscaling.target_ttft_s == 1
    config = config_from({"num_groups": 3})
    assert (config.min_groups, config.max_groups) == (3, 3)


@pytest.mark.parametrize("name", ["host", "group_host"])
def test_an_empty_address_which_would_be_all_of_them_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='': must be an address"):
        config_from({name: ""})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"num_groups": 2}, True),
        ({"autoscaling": {"max_groups": 4}}, True),
        ({"num_groups": 2, "engine": {"kv_transfer": False}}, False),
        ({"engine": {"kv_transfer": True}}, True),
        ({"num_groups": 2, "engine": {"enable_prefix_caching": False}}, False),
        (
            {"num_groups": 2, "nodes_per_group": 2, "engine": {"tensor_parallel_size": 2}},
            False,
        ),
    ],
)
def test_groups_exchange_blocks_where_there_may_be_several(
    given: dict[str, object], expected: bool
) -> None:
    assert config_from(given).transfers_kv == expected


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"tensor_parallel_size": 2}, "nodes_per_group=2: must be 1 with engine.kv_transfer"),
        ({"enable_prefix_caching": False}, "needs engine.enable_prefix_caching"),
    ],
)
def test_where_groups_cannot_exchange_blocks_asking_for_it_is_refused(
    engine: dict[str, object], message: str
) -> None:
    nodes = 2 if "tensor_parallel_size" in engine else 1
    with pytest.raises(ConfigError, match=message):
        config_from({"nodes_per_group": nodes, "engine": {"kv_transfer": True, **engine}})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, inf),
        ({"autoscaling": {"max_groups": 4}}, inf),
        ({"max_queue_wait_s": 0.7}, 0.7),
        ({"max_queue_wait_s": 0}, 0.0),
    ],
)
def test_only_a_given_bound_refuses_by_predicted_wait(
    given: dict[str, object], expected: float
) -> None:
    assert config_from(given).admission().max_queue_wait_s == expected


def test_more_models_are_read_by_name_and_share_what_is_the_clusters() -> None:
    config = config_from(
        {
            "served_model_name": "a",
            "num_groups": 3,
            "drain_timeout_s": 7,
            "more_models": [
                {"served_model_name": "b", "engine": {"model": "/m", "block_size": 32}},
                {
                    "served_model_name": "c",
                    "engine": {"model": "/c"},
                    "autoscaling": {"min_groups": 0, "max_groups": 4},
                },
            ],
        }
    )
    first, second, third = config.models.values()
    assert [*config.models] == ["a", "b", "c"]
    assert (first.num_groups, second.num_groups, third.max_groups) == (3, 1, 4)
    assert second.engine == EngineConfig(model=Path("/m"), block_size=32)
    assert {each.drain_timeout_s for each in config.models.values()} == {7}
    assert config_from({}).models == {demo_model.NAME: config_from({})}


def test_without_a_model_it_is_the_demo_model() -> None:
    config = config_from({})
    assert config.engine.model == demo_model.PATH
    assert config.model_name == demo_model.NAME
    assert config_from({"served_model_name": "mine"}).model_name == "mine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_group": 2}, "num_group: unknown; there are engine, "),
        ({"engine": {"blocksize": 16}}, "engine.blocksize: unknown; there are model, "),
        ({"num_groups": "two"}, "num_groups='two': "),
        ({"engine": {"block_size": 24}}, "block_size=24: must be a power of two"),
        ({"handover_s": -1}, "handover_s=-1.0: must be 0 or more, and finite"),
        ({"routing": {"policy": "fastest"}}, "policy='fastest': must be one of prefix_aware, "),
        ({"routing": {"polcy": "random"}}, "routing.polcy: unknown; there are policy, "),
        ({"routing": "random"}, "routing='random': must be a mapping"),
        ({"autoscaling": {"max_group": 2}}, "autoscaling.max_group: unknown; there are min_groups"),
        ({"autoscaling": {"max_groups": 0}}, "max_groups=0: must be 1 or more"),
        ({"autoscaling": 3}, "autoscaling=3: "),
        ({"num_groups": 0}, "num_groups=0: must be 1 or more"),
        ({"more_models": [{"num_group": 2}]}, "more_models.0.num_group: unknown; there are "),
        ({"more_models": [{"http_port": 2}]}, "more_models.0.http_port: unknown; there are "),
        ({"more_models": [{}, {"engine": {"x": 1}}]}, "more_models.1.engine.x: unknown; "),
        ({"more_models": ["m"]}, "more_models.0='m': must be a mapping"),
        ({"more_models": "m"}, "more_models='m': "),
        ({"more_models": [{}]}, "more_models.0.engine.model: is missing"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_from(settings)
    assert str(raised.value).startswith(message)
