"""Fetch the training text, clean it and train the tokenizer.

Run from the root of the repository: python -m tools.demo_model.prepare
The text goes to build/demo_model, the tokenizer to the package.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tools.demo_model import chats, packages, prose, wordnet

SEED = 20
VOCAB_SIZE = 4096
MAX_LENGTH = 1024
PACKAGE = Path(__file__).parents[2] / "worker/quire/demo_model"
BUILD = Path(__file__).parents[2] / "build/demo_model"


def collect(folders: dict[str, Path], rng: random.Random) -> dict[str, Any]:
    """All the text, with some words, paragraphs and phrasings held out for the evaluation."""
    net = wordnet.WordNet(folders["wordnet-base"] / "usr/share/wordnet")
    net.link_hyponyms()
    words = []
    for word, synset in net.usual_words():
        turns = wordnet.word_turns(net, word, synset, rng)
        words.append({"count": net.count[word, synset.part], "turns": turns})
    rng.shuffle(words)

    paragraphs = (
        prose.sqlite_paragraphs(folders["sqlite3-doc"])
        + prose.jargon_paragraphs(folders["dict-jargon"])
        + prose.element_paragraphs(folders["dict-elements"])
    )
    rng.shuffle(paragraphs)

    questions = []
    held_out_questions = []
    for number, question in enumerate(chats.hand_written()):
        phrasings = list(question.phrasings)
        # Only questions with many phrasings can spare one.
        if len(phrasings) >= 4 and number % 2 == 0:
            held_out_questions.append([phrasings.pop(2), question.answer])
        questions.append(
            {"topic": question.topic, "phrasings": phrasings, "answer": question.answer}
        )
    return {
        "words": words[400:],
        "held_out_words": words[:400],
        "prose": paragraphs[200:],
        "held_out_prose": paragraphs[:200],
        "questions": questions,
        "held_out_questions": held_out_questions,
    }


def tokenizer_text(data: dict[str, Any], system: str) -> Iterator[str]:
    """What the tokenizer is trained on: what the model will read and write most often."""
    yield from data["prose"]
    for word in data["words"]:
        for question, answer in word["turns"][:4]:
            yield question
            yield answer
    for _ in range(20):
        yield system
        for question in data["questions"]:
            yield from question["phrasings"]
            yield question["answer"]


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE tokenizer that can encode any Unicode text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=chats.SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chats.BEGIN} $A",
        pair=f"{chats.BEGIN} $A $B",
        special_tokens=[(chats.BEGIN, tokenizer.token_to_id(chats.BEGIN))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chats.BEGIN,
        "eos_token": chats.END,
        "pad_token": chats.END,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": chats.CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Write build/demo_model/data.json and the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--downloads", type=Path, default=BUILD / "packages")
    arguments = parser.parse_args()
    rng = random.Random(SEED)
    data = collect(packages.fetch(arguments.downloads), rng)
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "data.json").write_text(json.dumps(data))
    system = (PACKAGE / "system_prompt.txt").read_text()
    tokenizer = train_tokenizer(tokenizer_text(data, system))
    save_tokenizer(tokenizer, PACKAGE)

    num_turns = sum(len(word["turns"]) for word in data["words"])
    num_characters = sum(map(len, data["prose"]))
    print(f"{len(data['words'])} words, {num_turns} questions about them")
    print(f"{len(data['questions'])} hand-written questions")
    print(f"{len(data['prose'])} paragraphs, {num_characters} characters")
    print(f"{len(tokenizer.encode(system).ids)} tokens in the system prompt")


if __name__ == "__main__":
    main()
