"""One completion's life at a gateway: routed, relayed, and resumed when its group is lost."""
