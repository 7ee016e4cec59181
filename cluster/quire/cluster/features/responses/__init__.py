"""OpenAI's Responses API, ``POST /v1/responses``: its bodies, and its answers."""
