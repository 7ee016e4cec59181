"""Admission: which requests go to groups, which wait at the gateway, and which are refused.

It may import `links` and `telemetry`, the router, and of the worker `request`.
"""
