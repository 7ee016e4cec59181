"""The flags of commands that measure one engine, and its configuration from them."""

import argparse
from pathlib import Path

from quire.cluster.cli.flags import add_settings, given_settings
from quire.worker.request.config import EngineConfig

_MEASURED = (
    *("block_size", "enable_prefix_caching", "gpu_memory_utilization", "kv_cache_memory_bytes"),
    *("kv_disk_dir", "kv_disk_size", "kv_events", "kv_offloading_size", "kv_transfer"),
    *("max_model_len", "seed"),
)
"""Settings that measurements set themselves."""


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of an engine to a command that measures it."""
    add_settings(parser, EngineConfig, without=_MEASURED)


def engine_config(arguments: argparse.Namespace, model: Path | None) -> EngineConfig:
    """The configuration of the engine of ``model`` from the flags; without a model, the demo
    model's. Raises ConfigError: the flags cannot work."""
    from quire import demo_model

    given = given_settings(arguments, EngineConfig)
    return EngineConfig(**given | {"model": model or demo_model.PATH})
