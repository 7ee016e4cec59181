"""Names that models and adapters may not share, before anything of a change has begun."""

from typing import Any

import pytest

from quire import demo_model
from quire.cluster.config import ClusterConfig, LoraModule, ModelConfig
from quire.cluster.deploy.change import Cluster, check_names
from quire.cluster.deploy.listed import Listed
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

ENGINE = EngineConfig(model=demo_model.PATH, enable_lora=True)
SERVED = ModelConfig(
    engine=ENGINE,
    served_model_name="chat",
    aliases=("gpt-4",),
    lora_modules=(LoraModule(name="configured", path="x"),),
)
CLUSTER = Cluster("app", ClusterConfig(engine=ENGINE), [Listed(settings=SERVED, part="p")])


def model(**names: Any) -> ModelConfig:
    return ModelConfig(**{"engine": ENGINE, "served_model_name": "new", **names})


@pytest.mark.parametrize("taken", ["chat", "gpt-4", "configured", "loaded"])
@pytest.mark.parametrize(
    "names",
    [
        lambda name: {"served_model_name": name},
        lambda name: {"aliases": ("other", name)},
        lambda name: {"lora_modules": (LoraModule(name=name, path="y"),)},
    ],
    ids=["model", "alias", "adapter"],
)
def test_no_new_name_is_one_that_is_used(names: Any, taken: str) -> None:
    with pytest.raises(ConfigError, match=f"'{taken}': a .* of app is called that already"):
        check_names(CLUSTER, model(**names(taken)), loaded=["loaded"])
    check_names(CLUSTER, model(**names("free")), loaded=["loaded"])
