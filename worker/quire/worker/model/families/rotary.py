"""Reads rotary embeddings from the fields that most families' configurations share."""

import math

from quire.worker.model.spec import Rope
from quire.worker.weights.fields import Fields

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_KNOWN = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "max_position_embeddings", "partial_rotary_factor"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "finetuned"),
}
_POSITIONS = "original_max_position_embeddings"


def rope_section(config: Fields) -> Fields:
    """The RoPE fields, from either format: ``rope_theta`` + ``rope_scaling`` (transformers 4) or
    ``rope_parameters`` (transformers 5)."""
    names = ("rope_parameters", "rope_scaling")
    return config.section(next((name for name in names if config.raw.get(name)), names[0]))


def max_positions(config: Fields, name: str = "max_position_embeddings") -> int:
    """The value of the field ``name``, or more if YaRN extends an original context."""
    trained, section = config.count(name), rope_section(config)
    section = section.section("full_attention") if "full_attention" in section.raw else section
    original = section.raw.get(_POSITIONS, config.raw.get(_POSITIONS))
    if section.raw.get("rope_type", section.raw.get("type")) != "yarn" or original is None:
        return trained
    first = Fields({_POSITIONS: original}, config.file).count(_POSITIONS)
    extended = int(first * section.number("factor", default=1.0))
    # The product is a count of positions like any other.
    return max(trained, Fields({"positions": extended or 1}, config.file).count("positions"))


def rope(
    config: Fields,
    *,
    head_size: int,
    section: Fields | None = None,
    partial: float | None = None,
    theta: float = 10_000.0,
    interleaved: bool = False,
    knows: tuple[str, ...] = (),
) -> Rope:
    """The rotary embedding of ``section``, or of the configuration if that is ``None``.

    ``partial`` and ``theta`` are the defaults of missing fields; if ``partial`` is ``None``, the
    family always rotates whole heads. ``knows`` names fields of the family's own.
    """
    fields = rope_section(config) if section is None else section
    kind = fields.raw.get("rope_type", fields.raw.get("type", "default"))
    if kind not in _REQUIRED:
        raise config.refused("rope_type", kind, f"; one of {', '.join(_REQUIRED)}")
    fields.refuse(*(set(fields.raw) - _KNOWN - set(knows)))
    size = head_size
    for each in (fields, config):
        part = each.number("partial_rotary_factor", default=1.0)
        if partial is None and part != 1.0:
            raise config.refused("partial_rotary_factor", part)
    if partial is not None:
        part = config.number("partial_rotary_factor", default=partial)
        size = int(head_size * fields.number("partial_rotary_factor", default=part))
        if not 2 <= size <= head_size or size % 2:
            raise config.broken(f"{size} channels of {head_size} cannot be rotated")
    has_own_theta = fields.raw.get("rope_theta") is not None
    theta = (fields if has_own_theta else config).number("rope_theta", default=theta)
    if theta < 1 or (theta == 1 and kind == "yarn"):  # YaRN divides by its logarithm.
        raise config.wrong("rope_theta", theta, "more than 1")
    if kind == "default":
        return Rope(size=size, theta=theta, interleaved=interleaved)
    missing = [name for name in _REQUIRED[kind] if fields.raw.get(name) is None]
    if missing:
        raise config.broken(f"rope_type={kind!r} lacks {', '.join(missing)}")
    low = fields.number("low_freq_factor", default=1.0)
    high = fields.number("high_freq_factor", default=4.0)
    if high <= low:
        raise config.wrong("high_freq_factor", high, f"more than low_freq_factor={low!r}")
    trained = config.count("max_position_embeddings")
    original = config.count(_POSITIONS, default=fields.count(_POSITIONS, default=trained))
    factor = fields.number("factor", default=trained / original)
    is_long = kind == "longrope"
    return Rope(
        size=size,
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
        beta_fast=fields.number("beta_fast", default=32.0),
        beta_slow=fields.number("beta_slow", default=1.0),
        truncate=fields.flag("truncate", default=True),
        attention_factor=_attention_factor(kind, fields, factor=factor, original=original),
        short_factors=fields.numbers("short_factor", count=size // 2) if is_long else (),
        long_factors=fields.numbers("long_factor", count=size // 2) if is_long else (),
        interleaved=interleaved,
    )


def ropes_by_type(
    config: Fields, *, head_size: int, theta: float, sliding_theta: float
) -> tuple[Rope, Rope]:
    """The rotary embeddings of layers with full attention and of layers with a window. The latter
    are scaled only if the configuration has a section for them."""
    section = rope_section(config)
    full, sliding = section, Fields({"rope_theta": sliding_theta}, config.file)
    if "full_attention" in section.raw or "sliding_attention" in section.raw:
        full, sliding = section.section("full_attention"), section.section("sliding_attention")
    return (
        rope(config, head_size=head_size, section=full, theta=theta),
        rope(config, head_size=head_size, section=sliding, theta=sliding_theta),
    )


def _attention_factor(kind: str, fields: Fields, *, factor: float, original: int) -> float:
    """The configured attention factor, or else the one of the YaRN or LongRoPE paper."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if fields.raw.get("attention_factor") is not None or factor <= 1.0:
        return fields.number("attention_factor", default=1.0)
    if kind == "longrope" and original == 1:
        raise fields.wrong(_POSITIONS, original, "more than 1")
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scales = [fields.raw.get(name) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return 0.1 * math.log(factor) + 1.0
    above, below = (
        0.1 * fields.number(name, default=1.0) * math.log(factor) + 1.0
        for name in ("mscale", "mscale_all_dim")
    )
    return above / below
