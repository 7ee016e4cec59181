"""Measurements of one engine on a workload of the user's: what ``quire bench`` runs. No Ray."""
