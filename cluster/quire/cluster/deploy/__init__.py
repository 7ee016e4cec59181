"""Starting, changing, watching and stopping a cluster on Ray.

It may import everything but `cli` and `tools`. What is private to Ray is used in `ray_private`
alone.
"""
