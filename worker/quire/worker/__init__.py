"""One replica group's engine: blocks, prefix cache, scheduler, model, tensor-parallel ranks.

It does not depend on Ray or on other groups. Users reach it through ``quire.llm``. Each folder
is a room; `tests/test_layers.py` says what each may import.
"""
