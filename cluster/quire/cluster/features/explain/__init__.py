"""Why a request went to its group: ``quire explain`` and ``GET /v1/routing``."""
