"""The processes of a tensor-parallel group, and the engine's connections to them."""
