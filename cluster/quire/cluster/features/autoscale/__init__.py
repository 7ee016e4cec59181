"""Autoscaling: how many groups and gateways there should be."""
