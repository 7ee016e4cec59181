"""``quire bench serve``: load on any server that speaks OpenAI's API, and what its clients see.

Nothing here needs torch, Ray or a Quire on the other side.
"""
