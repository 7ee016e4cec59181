"""Converts a checkpoint to GGUF with llama.cpp's own converter, without a vocabulary.

    python llama_cpp_convert.py LLAMA_CPP CHECKPOINT FILE

It runs in a separate process because the converter imports its own version of ``gguf``.
"""

import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    source, checkpoint, file = map(Path, sys.argv[1:])
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    gguf: Any = importlib.import_module("gguf")
    base: Any = importlib.import_module("conversion.base")
    for name in ("gemma", "llama", "phi", "qwen"):
        importlib.import_module(f"conversion.{name}")
    (architecture,) = base.ModelBase.load_hparams(checkpoint, False)["architectures"]
    model = base.ModelBase.from_model_architecture(architecture)
    model.set_vocab = lambda self: self.gguf_writer.add_tokenizer_model("none")
    model(checkpoint, gguf.LlamaFileType.ALL_F32, file).write()


if __name__ == "__main__":
    main()
