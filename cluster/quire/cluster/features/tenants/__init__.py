"""Tenants: their API keys, limits, shares of the queue and the slots, and their usage."""
