"""A gateway without transports: preparing requests, admitting them, streaming answers."""
