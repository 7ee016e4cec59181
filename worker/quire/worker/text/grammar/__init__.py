"""Grammars of constrained outputs: of JSON schemas, regular expressions, GBNF and Lark."""
