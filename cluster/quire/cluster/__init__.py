"""The cluster around the engine, on Ray Serve: gateways, replica groups and the command line.

A request passes through `edge`, `gateway` and `links` of a gateway, and reaches a
`group`. What the cluster can do without is in `features`, what needs no cluster in `tools`: nothing
else may import these two (`tests/test_features.py`). `docs/design.md` walks through a request.
"""
