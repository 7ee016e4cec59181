"""A replica group: the loop around its engine, and its service for gateways.

It may import the worker, and `links` for addresses.
"""
