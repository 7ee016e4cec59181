"""The ranks of a group: where they run, and those that run on other nodes."""
