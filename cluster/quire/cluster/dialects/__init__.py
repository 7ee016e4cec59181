"""How model families write reasoning and tool calls: one table, a parser and grammars from it."""
