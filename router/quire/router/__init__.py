"""The global block directory, the routing policies, and the request router for Ray Serve."""
