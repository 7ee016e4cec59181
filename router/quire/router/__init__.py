"""The global block directory, the routing policy, and the request router that Ray Serve calls."""
