"""Between text and token ids: tokenizers, chat templates, bounds on what either may cost."""
