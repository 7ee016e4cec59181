"""A gateway: checks, tokenizes and hashes requests, streams answers, counts what happens."""
