"""The quantised formats of weights and KV caches. Does not import torch."""

from typing import Literal

Quantization = Literal["int8", "w4"]
"""Formats of linear layers: "int8" has a scale per output for weights and one per row for inputs;
"w4" has 4-bit weights with a scale for each 32 of them, and an LM head in int8."""

KvCacheDType = Literal["auto", "int8", "fp8"]
"""Type of the KV cache: "auto" is the weights' type; int8 has a scale for each token and head."""

SCALE_BYTES = 4
"""Size of the float32 scale that an int8 cache stores after the values of each token and head."""
