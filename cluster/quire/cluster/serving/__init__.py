"""A gateway without transports: its models, and how a request is prepared, admitted and run.

It may import `failover`, `links`, `dialects` and `telemetry`, the router, and of the worker
`request`, `blocks` and `text`.
"""
