"""``quire demo``: a cluster on this machine that answers a few questions and is stopped."""
