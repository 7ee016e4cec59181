"""Turn WordNet into short chats: what a word means, its synonyms, its kind, an example."""

import random
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

Turn = tuple[str, str]

_DATA_FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "r": "data.adv"}
_INDEX_FILES = {"n": "index.noun", "v": "index.verb", "a": "index.adj", "r": "index.adv"}
_SENSE_TYPES = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}

# Lexicographer files whose nouns are mostly things that can be counted: animals, artifacts,
# body parts, natural objects, people, plants.
_COUNTABLE = {5, 6, 8, 17, 18, 20}
# Rarely used words of these files (animals, artifacts, food, plants) are still good questions.
_CONCRETE = {5, 6, 13, 20}

_UNWANTED = re.compile(
    r"slur|offensive|disparag|obscen|vulgar|sexual|\bsex\b|genital|prostitut|derogat|ethnic"
    r"|\brape|penis|vagina|coitus|erotic|masturbat|excre|feces|narcotic|heroin|\bkill|murder"
    r"|negro|homosexual|lesbian|suicid|torture|lynch|retard|copulat|intercourse|scrotum|anus",
    re.IGNORECASE,
)


@dataclass
class Synset:
    """One meaning: its words, its definition, its examples and its relations."""

    part: str
    lexicographer_file: int
    words: list[str]
    definition: str
    examples: list[str]
    hypernyms: list[str]
    hyponyms: list[str] = field(default_factory=list)


class WordNet:
    """The parts of the database that the questions need."""

    def __init__(self, folder: Path) -> None:
        self.synsets: dict[str, Synset] = {}
        self.first_sense: dict[tuple[str, str], str] = {}
        self.count: dict[tuple[str, str], int] = defaultdict(int)
        for part, name in _DATA_FILES.items():
            for line in (folder / name).read_text().splitlines():
                if not line.startswith("  "):
                    self._add_synset(part, line)
        for part, name in _INDEX_FILES.items():
            for line in (folder / name).read_text().splitlines():
                if not line.startswith("  "):
                    fields = line.split()
                    num_pointers = int(fields[3])
                    offset = fields[6 + num_pointers]
                    self.first_sense[fields[0].replace("_", " "), part] = part + offset
        for line in (folder / "cntlist.rev").read_text().splitlines():
            key, _, count = line.split()
            lemma, _, sense = key.partition("%")
            self.count[lemma.replace("_", " "), _SENSE_TYPES[sense[0]]] += int(count)

    def _add_synset(self, part: str, line: str) -> None:
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        num_words = int(fields[3], 16)
        words = [
            re.sub(r"\(\w+\)$", "", word).replace("_", " ")
            for word in fields[4 : 4 + 2 * num_words : 2]
        ]
        pointers = fields[5 + 2 * num_words :]
        hypernyms = [part + pointers[i + 1] for i, kind in enumerate(pointers[:-1]) if kind == "@"]
        examples = re.findall(r'"([^" ]+(?: [^" ]+){4,14})"', gloss)
        definition = re.sub(r'"[^"]*"?', "", gloss)
        definition = re.sub(r"\([^)]*\)", "", definition).split(";")[0]
        definition = re.sub(r"\s+", " ", definition).strip(" ,:.")
        key = part + fields[0]
        self.synsets[key] = Synset(part, int(fields[1]), words, definition, examples, hypernyms)

    def link_hyponyms(self) -> None:
        """Fill in `hyponyms`, the reverse of `hypernyms`."""
        for key, synset in self.synsets.items():
            for parent in synset.hypernyms:
                self.synsets[parent].hyponyms.append(key)

    def usual_words(self) -> list[tuple[str, Synset]]:
        """Words worth a question, in a fixed order, each with its most common meaning."""
        chosen: list[tuple[str, Synset]] = []
        for (word, part), key in sorted(self.first_sense.items()):
            synset = self.synsets[key]
            proper = not any(w == word for w in synset.words)  # "Paris" is "paris" in the index
            odd = not re.fullmatch(r"[a-z]+( [a-z]+)?", word) or len(word) < 3
            if proper or odd or not 12 <= len(synset.definition) <= 90:
                continue
            if _UNWANTED.search(word) or _UNWANTED.search(synset.definition):
                continue
            concrete = part == "n" and synset.lexicographer_file in _CONCRETE
            short = len(synset.definition) <= 60 and " " not in word
            if self.count[word, part] >= 2 or (concrete and short):
                chosen.append((word, synset))
        return chosen

    def common_name(self, key: str) -> str:
        """The most frequent word of a meaning."""
        synset = self.synsets[key]
        return max(synset.words, key=lambda word: self.count[word, synset.part])


def with_article(noun: str) -> str:
    """`noun` with "a" or "an"."""
    vowel = noun[0] in "aeiouAEIO" and not re.match(r"uni|eu|use|one|ura", noun)
    return f"{'an' if vowel or noun.startswith('hour') else 'a'} {noun}"


def sentence(text: str) -> str:
    """`text` with a capital letter and a full stop."""
    text = text.strip(" .")
    ending = "" if text[-1:] in "?!" else "."
    return text[:1].upper() + text[1:] + ending


def is_countable(synset: Synset) -> bool:
    """Whether the word takes an article, judged by its definition."""
    if re.match(r"(a|an|any|one|someone) ", synset.definition):
        return True
    bare = not re.match(r"(the|goods|cloth|material|clothing|things) ", synset.definition)
    return bare and synset.lexicographer_file in _COUNTABLE


def definition_turns(word: str, synset: Synset) -> list[Turn]:
    """Ways to ask what a word means, with full sentences as answers."""
    meaning = synset.definition
    if synset.part == "n":
        name = with_article(word) if is_countable(synset) else word
        bare = is_countable(synset) and not re.match(
            r"(a|an|any|one|the|some|someone|something|each|two|all) ", meaning
        )
        answer = sentence(f"{name} is {with_article(meaning) if bare else meaning}")
        questions = [f"What is {name}?"] * 3 + [
            f"Explain what {name} is.",
            f"Tell me what {name} is.",
            f"Define {word}.",
            f"What does {word} mean?",
        ]
    elif synset.part == "v":
        meaning = meaning.split(",")[0] if len(meaning) > 60 else meaning
        answer = sentence(f"to {word} means to {re.sub('^to ', '', meaning)}")
        questions = [f"What does it mean to {word}?", f"What does {word} mean?", f"Define {word}."]
    else:
        answer = sentence(f"{word} means {meaning}")
        questions = [f"What does {word} mean?"] * 2 + [f"What is the meaning of {word}?"]
    usable = [e for e in synset.examples if word in e.lower() and not _UNWANTED.search(e)]
    if usable and synset.part != "n":
        answer += f" For example: {sentence(usable[0])}"
    return [(question, answer) for question in questions]


def word_turns(net: WordNet, word: str, synset: Synset, rng: random.Random) -> list[Turn]:
    """All the questions about one word. Some are drawn, so that the types stay balanced."""
    turns = definition_turns(word, synset)
    rng.shuffle(turns)
    turns = turns[:3]
    others = [w for w in synset.words if w != word and w.islower()]
    if others:
        question = rng.choice([f"What is another word for {word}?", f"Name a synonym of {word}."])
        turns.append((question, f"Another word for {word} is {others[0]}."))
    usable = [e for e in synset.examples if word in e.lower() and not _UNWANTED.search(e)]
    if usable:
        turns.append((f"Use the word {word} in a sentence.", sentence(usable[0])))
    if synset.part == "n" and synset.hypernyms and is_countable(synset):
        turns += _kind_turns(net, word, synset, rng)
    return turns


def _kind_turns(net: WordNet, word: str, synset: Synset, rng: random.Random) -> list[Turn]:
    parent = net.common_name(synset.hypernyms[0])
    turns: list[Turn] = []
    name = with_article(word)
    if parent.islower() and net.synsets[synset.hypernyms[0]].lexicographer_file in _COUNTABLE:
        kind = with_article(parent)
        turns.append((f"What kind of thing is {name}?", sentence(f"{name} is a kind of {parent}")))
        turns.append((f"Is {name} {kind}?", sentence(f"yes, {name} is {kind}")))
        other = rng.choice(["fish", "bird", "tree", "vehicle", "tool", "building", "flower"])
        if other not in _ancestors(net, synset):
            answer = sentence(f"no, {name} is not {with_article(other)}, but {kind}")
            turns.append((f"Is {name} {with_article(other)}?", answer))
            rng.shuffle(turns)
            turns = turns[:2]
    kinds = sorted(
        {net.common_name(key) for key in synset.hyponyms},
        key=lambda kind: (-net.count[kind, "n"], kind),
    )
    kinds = [kind for kind in kinds if kind.islower() and kind != word][:3]
    if len(kinds) == 3 and not _UNWANTED.search(" ".join(kinds)):
        question = rng.choice([f"Name three kinds of {word}.", f"What kinds of {word} are there?"])
        listing = f"{kinds[0]}, {kinds[1]} and {kinds[2]}"
        turns += [(question, f"Three kinds of {word} are {listing}.")]
    return turns


def _ancestors(net: WordNet, synset: Synset) -> set[str]:
    found: set[str] = set(synset.words)
    todo = list(synset.hypernyms)
    while todo:
        parent = net.synsets[todo.pop()]
        found.update(parent.words)
        todo += parent.hypernyms
    return found
