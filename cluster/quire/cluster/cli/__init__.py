"""The command line: a module for each command, and helpers that commands share."""
