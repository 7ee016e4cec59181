"""The tokenizer's files beside an adapter, compared with those of its model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire.worker.request.errors import AdapterError
from quire.worker.weights.adapter_texts import FILE_NAMES, check_texts

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TRAINING = TEMPLATE.replace(
    "{{ m.content }}", "{% generation %}{{ m.content }}{%- endgeneration -%}"
)
BASE = {"chat_template": TEMPLATE, "added_tokens_decoder": {"1": {"content": "<eos>"}}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write(tmp_path / "model", **BASE)
    vocabulary = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<x>", "id": 2}]}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return folder


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_what_is_the_models_own_is_taken(model: Path, tmp_path: Path) -> None:
    check_texts(tmp_path, model)
    check_texts(write(tmp_path / "same", **BASE), model)
    check_texts(write(tmp_path / "less", chat_template=f"{TRAINING}\n"), model)
    folder = write(tmp_path / "more", added_tokens_decoder={"2": {"content": "<x>"}})
    (folder / "added_tokens.json").write_text('{"a": 0}')
    check_texts(folder, model)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_another_chat_template_is_refused_unless_the_model_is_served_with_it(
    model: Path, tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / "adapter", **BASE)
    other = "{{ messages }}"
    in_config = json.dumps({"chat_template": other})
    (folder / name).write_text(other if name.endswith("jinja") else in_config)
    with pytest.raises(AdapterError, match=f"^{folder}: its chat template .*--chat-template FILE"):
        check_texts(folder, model)
    check_texts(folder, model, chat_template=other)
    check_texts(folder, write(tmp_path / "base"))  # There, chats are refused.


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json"])
def test_a_token_that_the_model_lacks_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "adapter")
    new = {"3": {"content": "<new>"}}
    config = {"added_tokens_decoder": new} if "config" in name else {"<new>": 3}
    (folder / name).write_text(json.dumps(config))
    with pytest.raises(AdapterError, match="its tokenizer adds '<new>', which is no token"):
        check_texts(folder, model)


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_file_without_an_end_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "adapter")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(AdapterError, match=f"{name}: is no regular file"):
        check_texts(folder, model)
    (folder / name).unlink()
    (folder / name).touch()
    os.truncate(folder / name, 9 << 20)
    with pytest.raises(AdapterError, match=f"{name}: 9437184 bytes; such a file may have 8388608"):
        check_texts(folder, model)
