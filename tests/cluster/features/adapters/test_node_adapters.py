"""A gateway's node keeps an adapter only if its model can run it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire import demo_model
from quire.cluster.features.adapters.node import NodeAdapters
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import AdapterError


def write(folder: Path, module: str = "x", **config: Any) -> Path:
    folder.mkdir()
    save_file({f"{module}.lora_A.weight": np.ones((8, 16))}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def test_an_adapter_of_another_model_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_ADAPTER_DIR", str(tmp_path / "store"))
    node = NodeAdapters(EngineConfig(model=demo_model.PATH, enable_lora=True))
    folder = write(tmp_path / "adapter")
    with pytest.raises(AdapterError, match=f"^{folder}/adapter_model.safetensors: tensor 'x.lora"):
        node.keep(str(folder))
    with_template = write(tmp_path / "template")
    (with_template / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(AdapterError, match="its chat template is not that of the model"):
        node.keep(str(with_template))
    assert [*(tmp_path / "store").iterdir()] == []
