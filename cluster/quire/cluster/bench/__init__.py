"""Measurements of groups on a user's own machine. Code that serves does not import this package."""
