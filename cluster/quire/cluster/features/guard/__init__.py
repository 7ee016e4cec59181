"""Limits on connections over HTTP and gRPC: their number, age, silence and slowness.

Its modules:

    limits                       the settings
    listener, connection         HTTP, over uvicorn; what is private to it is in `uvicorn_private`
    grpc_guard, own_sockets      gRPC, whose sockets are watched from outside
    leaving                      connections that end when a gateway stops
"""
