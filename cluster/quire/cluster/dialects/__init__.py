"""How families of models write reasoning and tool calls, and how their text is read.

It may import of the worker `request`, `blocks` and `text`. A new way to write calls is an entry of
the table in `formats`; the parser and the grammar follow it.
"""
