"""Choices of tokens: penalties, bans and budgets, and constraints, whose grammars are compiled and
whose masks are computed while other requests run."""
