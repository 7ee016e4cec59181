"""A gateway's connections to replica groups, and what it learns through them.

It may import the router, and of the worker `request` and `blocks`.
"""
