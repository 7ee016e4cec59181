"""The processes of a tensor-parallel group and how the engine reaches them."""
