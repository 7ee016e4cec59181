"""The reference of the HTTP API that a gateway serves: ``/openapi.json`` and ``/docs``."""
