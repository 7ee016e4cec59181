"""``quire run-batch``: sends a file of requests in OpenAI's batch format to a server."""
