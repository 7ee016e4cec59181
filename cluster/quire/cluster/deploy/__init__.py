"""Starting, supervising and stopping a cluster on Ray."""
