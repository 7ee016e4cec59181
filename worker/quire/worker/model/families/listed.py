"""The models that the installed transformers lists. The list is read as text: an import takes
seconds, and torch. `quire.worker.model.through.classes` has the last word."""

import functools
import importlib.util
import re
from pathlib import Path

_DECODERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_PAIR = re.compile(r'\("([^"]+)", "([^"]+ForCausalLM)"\)')


def may_have(name: str) -> bool:
    """Whether transformers may have a model of this name."""
    listed = _models_of_transformers()
    return not listed or f'"{name}"' in listed


def decoder_of(model_type: str) -> str | None:
    """The architecture of the decoders of this type, if transformers lists one."""
    _, _, rest = _models_of_transformers().partition(f"{_DECODERS} =")
    return dict(_PAIR.findall(rest.partition("\n)\n")[0])).get(model_type)


@functools.cache
def _models_of_transformers() -> str:
    """The source of transformers' list of models; empty if it is not where it is expected."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return ""
    file = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    return file.read_text(encoding="utf-8") if file.is_file() else ""
