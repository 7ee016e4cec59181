"""A gateway without transports: its models, the preparing of requests, and their way to groups."""
