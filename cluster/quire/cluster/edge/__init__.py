"""What clients talk to: OpenAI's HTTP API and the gRPC services, errors, who may call what.

It may import `gateway`, `serving`, `dialects`, `links` and `telemetry`, and of the worker
`request`, `blocks` and `text`. A new call over HTTP is an `ApiRoute` beside its handler: it
declares who may call it and describes itself for the reference. Another project's API is a feature.
"""
