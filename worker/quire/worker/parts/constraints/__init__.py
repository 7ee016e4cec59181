"""Constrained outputs: compiles constraints and computes masks while other requests run."""
