"""The hand-written questions, their variations, and the layout of a chat in tokens."""

import random
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tools.demo_model.wordnet import Turn

BEGIN, END = "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BEGIN, END, SYSTEM, USER, ASSISTANT]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

QUESTIONS = Path(__file__).with_name("questions")
SYSTEM_SENTENCES = Path(__file__).with_name("system_sentences.txt")


@dataclass
class Question:
    """Several ways to ask one thing, and the answer."""

    topic: str
    phrasings: list[str]
    answer: str


def hand_written() -> list[Question]:
    """All the questions of the TOML files, tables of facts included."""
    found: list[Question] = []
    for path in sorted(QUESTIONS.glob("*.toml")):
        content = tomllib.loads(path.read_text())
        found += [Question(path.stem, entry["q"], entry["a"]) for entry in content["qa"]]
        for number, table in enumerate(content.get("table", [])):
            for key, value in table["rows"].items():
                phrasings = [question.format(key=key) for question in table["q"]]
                answer = table["a"].format(key=key, value=value)
                found.append(Question(f"{path.stem}-table-{number}", phrasings, answer))
    return found


_OPENINGS = [
    "Please tell me: ",
    "Can you tell me this? ",
    "I would like to know: ",
    "Quick question: ",
    "Hello! ",
    "Hi, ",
    "Hey, ",
    "Please answer briefly. ",
    "One more question: ",
    "In one sentence: ",
    "In simple words: ",
]
_CLOSINGS = [" Please be brief.", " Thanks!", " Please explain.", " Explain it simply.", " Please."]
_REWORDINGS = [
    "Can you explain what {verb} {thing}?",
    "Tell me what {thing} {verb}.",
    "Do you know what {thing} {verb}?",
    "Please explain what {thing} {verb}.",
    "Could you tell me what {thing} {verb}?",
    "I want to know what {thing} {verb}.",
    "What exactly {verb} {thing}?",
    "So what {verb} {thing}?",
]


def vary(question: str, rng: random.Random) -> str:
    """Reword a question lightly, as another person might type it."""
    draw = rng.random()
    if draw < 0.4:
        return question
    match = re.fullmatch(r"What (is|are) ([^?]+)\?", question)
    if match and draw < 0.6:
        verb, thing = match.groups()
        question = rng.choice(_REWORDINGS).format(verb=verb, thing=thing)
    elif match and draw < 0.65 and match[1] == "is":
        question = f"What's {match[2]}?"
    elif draw < 0.75:
        opening = rng.choice(_OPENINGS)
        keeps_capital = opening[-2] in "?!."
        question = opening + (question if keeps_capital else question[0].lower() + question[1:])
    elif draw < 0.8:
        question = question + rng.choice(_CLOSINGS)
    if rng.random() < 0.15:
        question = question.rstrip("?.!")
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    return question


class SystemPrompts:
    """Draws system prompts: the packaged one, parts of it, and other instructions."""

    def __init__(self, packaged: str, others: list[str]) -> None:
        self.packaged = packaged.strip()
        self._sentences = re.split(r"(?<=\.) ", self.packaged)
        self._others = others

    def draw(self, rng: random.Random, *, longest: int) -> str:
        """A system prompt of up to `longest` sentences."""
        draw = rng.random()
        if draw < 0.55:
            return self.packaged
        pool = self._others if draw < 0.75 else self._others + self._sentences
        num_sentences = min(len(pool), rng.choice([1, 1, 2, 3, 5, 8, longest]))
        return " ".join(rng.sample(pool, num_sentences))


class Encoder:
    """Encodes chats piece by piece. A token counts in the loss when its flag is set."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab()
        self.begin, self.end = vocabulary[BEGIN], vocabulary[END]
        self.system, self.user, self.assistant = (
            vocabulary[token] for token in (SYSTEM, USER, ASSISTANT)
        )
        self._tokenizer = tokenizer

    @lru_cache(maxsize=500_000)  # noqa: B019  (one encoder lives as long as the program)
    def text(self, text: str) -> tuple[int, ...]:
        """The tokens of plain text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def prefix(self, system: str | None) -> list[int]:
        """What stands before the first turn."""
        if system is None:
            return [self.begin]
        return [self.begin, self.system, *self.text(system), self.end]

    def chat(self, turns: list[Turn]) -> tuple[list[int], list[bool]]:
        """The turns of a chat; only what the assistant says counts."""
        ids: list[int] = []
        counts: list[bool] = []
        for question, answer in turns:
            asked = [self.user, *self.text(question), self.end, self.assistant]
            said = [*self.text(answer), self.end]
            ids += asked + said
            counts += [False] * len(asked) + [True] * len(said)
        return ids, counts

    def prose(self, paragraph: str) -> tuple[list[int], list[bool]]:
        """A plain paragraph; everything counts."""
        ids = [*self.text(paragraph), self.end]
        return ids, [True] * len(ids)
