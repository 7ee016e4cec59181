"""Measurements of groups on a user's own machine: nothing that serves knows them."""
