"""Formats of tool calls and reasoning that are read from a model's chat template."""
