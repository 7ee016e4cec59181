"""Small tokenizers of every kind that models use, and texts in 23 scripts to test them with.

Tokenizers of real models are included once ``python -m tools.real_tokenizers`` has fetched them.
"""

import json
from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from tools.real_tokenizers import NAMES, folder_of

from quire.worker.text.tokenizer import Tokenizer

SCRIPTS = {
    "Latin": "The cat sat, didn't it? Ærøskøbing  naïve\n\tend.",
    "Greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "Cyrillic": "Съешь ещё этих мягких булок, да выпей чаю",
    "Armenian": "Բոլոր մարդիկ ծնվում են ազատ",
    "Hebrew": "כל בני האדם נולדו בני חורין",
    "Arabic": "يولد جميع الناس أحرارا",
    "Devanagari": "सभी मनुष्य जन्म से स्वतंत्र हैं",
    "Bengali": "সমস্ত মানুষ স্বাধীনভাবে জন্মগ্রহণ করে",
    "Odia": "ସମସ୍ତ ମଣିଷ ଜନ୍ମକାଳରୁ ସ୍ୱାଧୀନ",
    "Tamil": "மனிதப் பிறவியினர் சகலரும் சுதந்திரமாகவே",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระ",
    "Lao": "ມະນຸດທຸກຄົນເກີດມາມີອິດສະລະ",
    "Tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས",
    "Khmer": "មនុស្សទាំងអស់កើតមកមានសេរីភាព",
    "Georgian": "ყველა ადამიანი იბადება თავისუფალი",
    "Amharic": "የሰው ልጅ ሁሉ ሲወለድ ነጻና",
    "Cherokee": "ᏂᎦᏓ ᎠᏂᏴᏫ ᏂᎨᎫᏓᎸᎾ ᎠᎴ",
    "Mongolian": "ᠬᠦᠮᠦᠨ ᠪᠦᠷ ᠲᠥᠷᠥᠵᠦ",
    "Han": "人人生而自由 齉龘靐𠀀𠮷",
    "Kana": "すべての人間は、ウマレながら",
    "Hangul": "모든 인간은 태어날 때부터",
    "Braille": "⠠⠁⠇⠇ ⠓⠥⠍⠁⠝ ⠃⠑⠊⠝⠛⠎",
    "Emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 family 🇪🇹!",
}

_TEXT = ["the cat sat on the mat and that is that, said the hat. Grüße aus Köln"] * 3
_SPECIAL = ["<unk>", "<s>", "</s>"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _gpt2() -> tokenizers.Tokenizer:
    """Byte-level BPE as GPT-2's."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [*_TEXT, *SCRIPTS.values()],
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["</s>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return made


def _words_with_their_space(*, byte_fallback: bool) -> models.BPE:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [*_SPECIAL, *(_BYTES if byte_fallback else [])]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=special, show_progress=False)
    made.train_from_iterator(_TEXT if byte_fallback else [*_TEXT, *SCRIPTS.values()], trainer)
    model = json.loads(made.to_str())["model"]
    model["vocab"].setdefault("▁", len(model["vocab"]))
    merges = [(left, right) for left, right in model["merges"]]
    return models.BPE(
        model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
    )


def _sentencepiece(*, strips: bool = True) -> tokenizers.Tokenizer:
    """BPE as Llama 2's: words with their space, byte fallback, and a text's first space is dropped.
    Without ``strips`` as Gemma's."""
    made = tokenizers.Tokenizer(_words_with_their_space(byte_fallback=True))
    prepend = [normalizers.Prepend("▁")] if strips else []
    made.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return _begun(made)


def _begun(made: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made.add_special_tokens(_SPECIAL)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def _metaspace(scheme: str = "always") -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(_words_with_their_space(byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _begun(made)


def _unigram() -> tokenizers.Tokenizer:
    """Unigram as T5's."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        [*_TEXT, *SCRIPTS.values()],
        trainers.UnigramTrainer(
            vocab_size=700, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
        ),
    )
    return _begun(made)


def _wordpiece() -> tokenizers.Tokenizer:
    """WordPiece as BERT's."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=700, special_tokens=_SPECIAL, show_progress=False
    )
    made.train_from_iterator([*_TEXT, *SCRIPTS.values()], trainer)
    return _begun(made)


def _suffixed() -> tokenizers.Tokenizer:
    """BPE as the first GPT's: the suffix of a word's last token stands for a space."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=_SPECIAL,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    made.train_from_iterator([*_TEXT, *SCRIPTS.values()], trainer)
    return _begun(made)


def _undecoded() -> tokenizers.Tokenizer:
    """Whole words between spaces, without a decoder."""
    words = dict.fromkeys([*_SPECIAL, *" ".join([*_TEXT, *SCRIPTS.values()]).split()])
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _begun(made)


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": _gpt2,
    "llama2": _sentencepiece,
    "gemma": lambda: _sentencepiece(strips=False),
    "metaspace": _metaspace,
    "metaspace, never": lambda: _metaspace("never"),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
    "suffix": _suffixed,
    "no decoder": _undecoded,
}


@cache
def made(kind: str) -> tokenizers.Tokenizer:
    """One of `KINDS`, or a real tokenizer. Skips the test if that one was not fetched."""
    if kind in KINDS:
        return KINDS[kind]()
    folder = folder_of(kind)
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: run python -m tools.real_tokenizers")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@cache
def loaded(kind: str) -> Tokenizer:
    return Tokenizer(made(kind))


ALL = [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)]
