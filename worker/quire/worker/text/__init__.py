"""Text processing with bounded work: tokenizers, chat templates, grammars, reasoning formats."""
