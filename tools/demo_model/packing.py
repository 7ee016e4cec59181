"""Pack many chats into one sequence, so that little of a batch is padding.

Every chat in a packed sequence stands behind one shared prefix (the system prompt) and sees
only that prefix and itself, at the positions it will have when the model is served. So one
computation of a long system prompt trains many chats.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tools.demo_model.chats import Encoder, SystemPrompts, vary

Document = tuple[list[int], list[bool]]

IGNORED = -100  # What cross_entropy ignores.


@dataclass
class Batch:
    """Packed sequences, B of them with T tokens each."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor
    mask_B1TT: torch.Tensor
    """Where attention may look."""
    rows_N: torch.Tensor
    """Indices into the flattened B*T positions whose next token counts in the loss."""
    targets_N: torch.Tensor
    num_targets: int
    """How many of the N count; the rest is padding with the target IGNORED."""


def pack(
    prefix: list[int], documents: Iterator[Document], length: int, shared: bool, filler: int
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """One sequence: ids, positions, document numbers, parent documents, targets (-1: none).

    With `shared`, all the documents follow one prefix. Without, each has its own.
    """
    ids = list(prefix) if shared else []
    positions = list(range(len(ids)))
    owner = [0] * len(ids)
    parent = [0] * len(ids)
    targets = [-1] * len(ids)
    number = 0
    while True:
        number += 1
        body, counts = next(documents)
        if not shared:
            body, counts = prefix + body, [False] * len(prefix) + counts
        if len(ids) + len(body) > length:
            break
        start = len(prefix) if shared else 0
        ids += body
        positions += range(start, start + len(body))
        owner += [number] * len(body)
        parent += [0 if shared else number] * len(body)
        targets += [
            body[i + 1] if i + 1 < len(body) and counts[i + 1] else -1 for i in range(len(body))
        ]
    padding = length - len(ids)
    ids += [filler] * padding
    positions += [0] * padding
    owner += [-1] * padding
    parent += [-1] * padding
    targets += [-1] * padding
    return ids, positions, owner, parent, targets


def collate(sequences: Sequence[tuple[list[int], ...]]) -> Batch:
    """Stack packed sequences into tensors."""
    ids, positions, owner, parent, targets = (
        torch.tensor(rows) for rows in zip(*sequences, strict=True)
    )
    length = ids.shape[1]
    causal_TT = torch.ones(length, length, dtype=torch.bool).tril()
    same_BTT = owner[:, :, None] == owner[:, None, :]
    above_BTT = parent[:, :, None] == owner[:, None, :]
    mask = (same_BTT | above_BTT) & causal_TT
    flat = targets.flatten()
    rows = (flat >= 0).nonzero().squeeze(1)
    num_targets = len(rows)
    # The matrix product library keeps code for every shape it has met: round the shape up.
    rows = F.pad(rows, (0, -num_targets % 256))
    chosen = torch.where(torch.arange(len(rows)) < num_targets, flat[rows], IGNORED)
    return Batch(ids, positions, mask[:, None], rows, chosen, num_targets)


class Mixture:
    """Draws training documents and builds batches from them."""

    def __init__(
        self, data: dict[str, Any], encoder: Encoder, systems: SystemPrompts, seed: int
    ) -> None:
        self._rng = random.Random(seed)
        self._encoder = encoder
        self._systems = systems
        self._prose = data["prose"]
        self._questions = data["questions"]
        self._words = data["words"]
        # Frequent words come more often: they are what people ask about.
        self._word_weights = [0.3 + min(word["count"], 20) / 5 for word in self._words]
        self._topics: dict[str, list[int]] = {}
        for index, question in enumerate(self._questions):
            self._topics.setdefault(question["topic"], []).append(index)
        self._word_queue: list[Any] = []

    def _hand_written(self, question: dict[str, Any]) -> tuple[str, str]:
        return vary(self._rng.choice(question["phrasings"]), self._rng), question["answer"]

    def hand_chat(self, longest: int = 3) -> Document:
        """A chat of one turn, or of several about neighbouring questions."""
        index = self._rng.randrange(len(self._questions))
        if "table" in self._questions[index]["topic"] and self._rng.random() < 0.4:
            index = self._rng.randrange(len(self._questions))
        turns = [self._hand_written(self._questions[index])]
        if self._rng.random() < 0.25:
            topic = self._topics[self._questions[index]["topic"]]
            for _ in range(self._rng.randint(1, longest - 1)):
                draw = self._rng.random()
                if draw < 0.3:
                    turns.append(self._word_turn())
                    continue
                if draw < 0.6:
                    follower = min(topic[-1], index + self._rng.randint(1, 3))
                else:
                    follower = self._rng.randrange(len(self._questions))
                turns.append(self._hand_written(self._questions[follower]))
        return self._encoder.chat(turns)

    def _word_turn(self) -> tuple[str, str]:
        if not self._word_queue:
            self._word_queue = self._rng.choices(self._words, self._word_weights, k=5000)
        question, answer = self._rng.choice(self._word_queue.pop()["turns"])
        return vary(question, self._rng), answer

    def word_chat(self) -> Document:
        """A chat about the meaning of a word."""
        turns = [self._word_turn() for _ in range(1 if self._rng.random() < 0.9 else 2)]
        return self._encoder.chat(turns)

    def paragraph(self) -> Document:
        """Plain text."""
        return self._encoder.prose(self._rng.choice(self._prose))

    def _stream(self, choices: dict[Callable[[], Document], float]) -> Iterator[Document]:
        draws, weights = list(choices), list(choices.values())
        while True:
            (draw,) = self._rng.choices(draws, weights)
            yield draw()

    def plain_batch(self, size: int, length: int, hand_share: float) -> Batch:
        """Chats and paragraphs without a system prompt."""
        stream = self._stream(
            {
                self.hand_chat: hand_share,
                self.word_chat: (1 - hand_share) * 0.85,
                self.paragraph: (1 - hand_share) * 0.15,
            }
        )
        prefix = self._encoder.prefix(None)
        filler = self._encoder.end
        return collate([pack(prefix, stream, length, False, filler) for _ in range(size)])

    def system_batch(self, size: int, length: int, hand_share: float) -> Batch:
        """Chats behind a system prompt, which the chats of a sequence share."""
        stream = self._stream({self.hand_chat: hand_share, self.word_chat: 1 - hand_share})
        sequences = []
        for _ in range(size):
            longest = 12 if length <= 512 else 40
            prefix = self._encoder.prefix(self._systems.draw(self._rng, longest=longest))
            sequences.append(pack(prefix, stream, length, True, self._encoder.end))
        return collate(sequences)


def fixed_batches(
    documents: list[Document], prefix: list[int], shared: bool, filler: int
) -> list[Batch]:
    """All the given documents, in batches of eight sequences, for an evaluation."""
    remaining = [document for document in documents if len(document[0]) + len(prefix) < 512]
    sequences = []
    while remaining:
        packed = pack(prefix, iter([*remaining, ([0] * 999, [False] * 999)]), 512, shared, filler)
        num_used = max(max(packed[2]), 1)
        remaining = remaining[num_used:]
        sequences.append(packed)
    return [collate(sequences[i : i + 8]) for i in range(0, len(sequences), 8)]
