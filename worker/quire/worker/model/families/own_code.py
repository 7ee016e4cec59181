"""Refuses a checkpoint whose own code (``auto_map``) computes something else than Quire would.

Many checkpoints still bring the code of an architecture that transformers has had since. The class
has the architecture's name, and Quire computes it. A class of any other name is refused. So is a
class of a decoder that makes embeddings, whatever its name: it exists to attend to later tokens.
"""

from quire.worker.model.families.registry import FAMILIES
from quire.worker.model.families.wrappers import architecture_of
from quire.worker.model.spec import ModelSpec
from quire.worker.weights.fields import Fields

_HEAD = "ForCausalLM"


def refuse_own_code(config: Fields, spec: ModelSpec) -> None:
    """Raises CheckpointError: ``config``, a whole ``config.json``, names a class of the
    checkpoint's own for what ``spec`` computes, which Quire would replace by another."""
    auto_class = "AutoModel" if spec.pooling is not None else "AutoModelForCausalLM"
    if spec.is_classifier:
        auto_class = "AutoModelForSequenceClassification"
    code = config.section("auto_map").raw.get(auto_class)
    if code is None:
        return
    name = architecture_of(config)
    stem = name.rpartition("For")[0] or name.removesuffix("Model")
    names = [name]
    if auto_class == "AutoModel":
        is_decoder = name.endswith(_HEAD) or f"{stem}{_HEAD}" in FAMILIES
        names = [] if is_decoder else [name, f"{stem}Model"]
    is_described = spec.through_transformers is None and not spec.is_text_part
    if is_described and stem.lower() != str(config.raw.get("model_type")).replace("_", ""):
        names = []  # An architecture's name in code that is another model's.
    if str(code).rpartition(".")[2] not in names:
        raise config.refused(
            f"auto_map.{auto_class}",
            code,
            f": code that comes with a checkpoint (trust_remote_code) is not run, and {name} of "
            "transformers may compute something else; serve a checkpoint without such code",
        )
