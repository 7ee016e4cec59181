"""One completion at a gateway: routed, relayed, and resumed when its group is lost.

It may import `links` and `telemetry`, the router, and of the worker `request` and `text`.
"""
