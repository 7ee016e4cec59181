"""A gateway's connections to replica groups, and what it learns through them."""
