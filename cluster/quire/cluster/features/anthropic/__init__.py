"""Anthropic's API, ``POST /v1/messages``: its bodies, and its answers made of our chunks."""
