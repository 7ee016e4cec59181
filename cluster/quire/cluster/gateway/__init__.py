"""A gateway without transports: its models, the preparing of requests, and their way to groups.

`pipeline` lists what happens to a request. It may import `serving`, `links`, `dialects` and
`telemetry`, the router, and of the worker `request`, `blocks` and `text`.
"""
