"""One replica group's engine: blocks, prefix cache, scheduler, model, tensor-parallel ranks.

Knows nothing of Ray or of other groups. Users meet it through ``quire.llm``.
"""
