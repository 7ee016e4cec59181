"""Routing policies: ours, and the known ones to compare it with."""
