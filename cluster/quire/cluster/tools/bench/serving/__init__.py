"""``quire bench serve``: puts load on any OpenAI-compatible server and measures what clients see.

This package needs neither torch nor Ray, and the server need not be Quire.
"""
