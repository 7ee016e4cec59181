"""The types of a request, from the gateway's edge to the engine. Imports neither torch nor gRPC,
since router and gateway use it too."""
