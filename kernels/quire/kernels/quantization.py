"""Which numbers of fewer bits weights and KV caches may be kept in. Knows no torch."""

from typing import Literal

Quantization = Literal["int8", "w4"]
"""What linear layers may compute in: "int8" is weights with a scale per output and inputs with one
per row; "w4" is weights of 4 bits with a scale for each 32 of them, and an LM head in int8."""

KvCacheDType = Literal["auto", "int8", "fp8"]
"""Type of the KV cache: "auto" is the weights' type; int8 has a scale for each token and head."""

SCALE_BYTES = 4
"""A float32 scale, which an int8 cache keeps behind the values of each token and head."""
