"""The record of each call, and the metrics and log lines that are made of it.

It may import `links` and the router. A new number of a call is a field of `timeline`, from which
metrics and log lines are made.
"""
