"""How many replica groups there are, as Ray Serve asks it, and which of them go first."""
