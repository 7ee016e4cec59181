"""Checks which published model configurations Quire supports: ``python -m tools.configs [FOLDER]``.

A line for each ``config.json`` says how its model would run: by a description, through transformers
(after a dry run that shows whether it can), or refused and why. ``(text)``: the text part of a
larger model. The default folder is that of aiconfigurator-core's wheel (`tools.strangers`): files
``NAME_config.json``, and ``NAME_hf_quant_config.json`` beside some. No weights are read.
"""

import argparse
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
from tools.strangers import wheel

from quire.worker.model.config import read_model_spec
from quire.worker.model.through.dry_run import dry_run
from quire.worker.request.errors import CheckpointError

_ENDING, _QUANT_ENDING = "_config.json", "_hf_quant_config.json"
_MOST_POSITIONS = 4096
"""Positions of a second dry run. The first, shorter one fails if a window is longer."""


def what_it_gets(folder: Path) -> tuple[str, str]:
    """How a model would run, in a word, and a sentence about refusals and bounds."""
    try:
        spec = read_model_spec(folder)
    except CheckpointError as error:
        return "refused", _said(error, folder)
    part = " (text)" if spec.is_text_part else ""
    if spec.through_transformers is None:
        return f"described{part}", ""
    why = ""
    for positions in (spec.max_positions, min(spec.max_positions, _MOST_POSITIONS)):
        try:
            dry_run(
                folder,
                spec,
                dtype=getattr(torch, spec.dtype),
                max_model_len=positions,
                is_deterministic=True,
            )
        except CheckpointError as error:
            why = why or _said(error, folder)
            continue
        bound = f"max_model_len={positions}; else: {why}" if why else ""
        return f"transformers{part}", bound
    return "refused", why


def _said(error: CheckpointError, folder: Path) -> str:
    return str(error).removeprefix(str(folder)).lstrip("/: ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    folder = parser.parse_args().folder
    if folder is None:
        folder = wheel("aiconfigurator-core") / "aiconfigurator_core/model_configs"
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob(f"*{_ENDING}")):
        name = file.name.removesuffix(_ENDING)
        if file.name.endswith(_QUANT_ENDING):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(file, Path(scratch) / "config.json")
            beside = folder / f"{name}{_QUANT_ENDING}"
            if beside.is_file():
                shutil.copy(beside, Path(scratch) / "hf_quant_config.json")
            word, why = what_it_gets(Path(scratch))
        counts[word] += 1
        print(f"{name.replace('--', '/')} | {word} | {why}", flush=True)
    served = counts.total() - counts["refused"]
    print(f"\n{served} of {counts.total()} served: {dict(counts)}")


if __name__ == "__main__":
    main()
