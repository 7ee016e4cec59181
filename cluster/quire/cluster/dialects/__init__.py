"""How model families write reasoning and tool calls: a table of formats, and the parser and
grammars that follow it."""
