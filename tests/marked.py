"""A tokenizer with the markers of known models, and texts that a grammar over its tokens allows."""

import random
from collections.abc import Sequence

import numpy as np
import tokenizers

from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.compiler import Grammars
from quire.worker.text.tokenizer import Tokenizer


def marked_tokenizer(*others: str) -> Tokenizer:
    """A tokenizer whose special tokens are ``others`` and the markers that known models have."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = {"<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"}
    special |= {"<escape>", "<start_function_call>", "<|tool_call>", "<tool_call|>", '<|"|>'}
    special |= {*others, "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>"}
    special |= {f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin")}
    special |= {f"<｜tool▁{mark}｜>" for mark in ("call▁end", "sep")}
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|end|>", *sorted(special - {"<|end|>"})],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the weather"], trainer)
    return Tokenizer(backend)


def grammars_of(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[0])


def walk(
    grammars: Grammars,
    marked: Tokenizer,
    constraint: Constraint | None,
    chance: random.Random,
    *,
    ends: Sequence[str] = ("</arg_value>", "\n</parameter>", "<escape>", '<|"|>'),
) -> str:
    """Draws a text that the grammar allows, token by token. It inserts ``ends`` on purpose: random
    tokens would hardly ever end a string that may hold any characters."""
    assert constraint is not None
    matcher = grammars.compile(constraint).matcher()
    token_ids: list[int] = []
    ahead: list[int] = []
    ends_of_texts = [marked.encode(text) for text in ends]
    while True:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask_W.view(np.uint8), bitorder="little"))
        # Quotes are preferred after 60 tokens, so that strings end.
        quotes = [each for each in allowed if each == 0 or chr(34) in marked.token_text(int(each))]
        if not ahead or ahead[0] not in allowed:
            ahead = list(chance.choice(ends_of_texts)) if chance.random() < 0.2 else []
        if ahead and ahead[0] in allowed:
            token_id = ahead.pop(0)
        else:
            token_id = int(
                chance.choice(quotes if quotes and len(token_ids) > 60 else list(allowed))
            )
        if token_id == 0:
            return marked.decode(token_ids, skip_special_tokens=False)
        token_ids.append(token_id)
        assert len(token_ids) < 3000
        matcher.consume([token_id])
        matcher.fill()
        assert matcher.error is None
