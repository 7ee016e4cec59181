"""A distributed LLM serving cluster on Ray, and its engine in your own process.

    from quire import LLM, SamplingParams

    with LLM(model="path/to/checkpoint") as llm:
        print(llm.generate(["Hello"], SamplingParams(max_tokens=32))[0].outputs[0].text)

This package re-exports the names of `quire.llm`. It imports that module when one of them is first
used, so that a program that only needs `quire.cluster` or `quire.router` does not load torch.

Each source root of the repository has a folder ``quire``. All of them form this one package; the
worker's folder holds this file.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.llm import (
        LLM,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        LoRARequest,
        RequestOutput,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
    )

    __version__: str

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "__version__",
]

__path__ = pkgutil.extend_path(__path__, __name__)

_DISTRIBUTION = "quire-serve"
_UNKNOWN = "0+unknown"
"""``__version__`` where Quire is imported from ``sys.path`` without being installed."""


if not TYPE_CHECKING:  # mypy uses the declarations above, and reports unknown names.

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value: object = _version()
        elif name in __all__:
            from quire import llm

            value = getattr(llm, name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return _UNKNOWN
