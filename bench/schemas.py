"""Checks outputs that JSON schemas constrain against the schemas, with a third-party validator.

    python -m bench.schemas [--number N] [--seed N] [--checkpoint FOLDER]

Schemas are drawn by a generator, with a value that fits each. Of each one this shows whether an
output drawn at random among the allowed tokens is valid by the package jsonschema (formats too),
whether the value's text is allowed, and how long compiling took.
"""

import ipaddress
import json
import random
import string
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.report import command

from quire.worker.request.arrays import Ints
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.structured import json_constraint
from quire.worker.text.grammar.compiler import Grammar, Grammars
from quire.worker.text.tokenizer import Tokenizer

Schema = dict[str, Any]
Drawn = tuple[Schema, Any]
"""A schema, and a value that fits it."""

_NAMES = ("id", "name", "email", "kind", "a b", "größe", "items", "ok", 'q"', "x/y~z")
_LONG, _LONGEST = 80, 1000
"""Tokens behind which an output is led to its end, and behind which it is given up."""
EOS = 2


def main() -> None:
    parser = command("bench.schemas", __doc__)
    parser.add_argument("--number", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="whose tokenizer; default: a random one")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or make_checkpoint(SHAPES["S"], Path(tempfile.gettempdir()))
    tokenizer = Tokenizer.load(checkpoint)
    found = check(tokenizer, arguments.number, seed=arguments.seed, eos_token_id=EOS)
    print(f"{arguments.number} schemas, {tokenizer.vocab_size} tokens")
    for name, number in sorted(found.counts.items()):
        print(f"{name}: {number}")
    for example in sorted(found.examples, key=lambda each: each.startswith("refused"))[:5]:
        print(example)
    percentiles = [50, 99, 99.9, 100]
    shown = zip(percentiles, np.percentile(found.compile_s, percentiles), strict=True)
    print("compile, ms:", ", ".join(f"p{p:g} {1e3 * each:.2f}" for p, each in shown))


class Found:
    """What came of all schemas."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        """Of what is wrong."""
        self.compile_s: list[float] = []

    def wrong(self, kind: str, schema: Schema, text: str) -> None:
        self.counts[kind] += 1
        self.examples.append(f"{kind}: {text[:300]!r} of {json.dumps(schema)[:600]}")


def check(tokenizer: Tokenizer, number: int, *, seed: int, eos_token_id: int) -> Found:
    grammars = Grammars(
        lambda: tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[eos_token_id]
    )
    grammars.compile(json_constraint())  # Reads the tokenizer.
    walker = Walker(tokenizer, eos_token_id)
    rng, found = random.Random(seed), Found()
    for index in range(number):
        schema, value = draw_object(rng, depth=3)
        schema = {"title": str(index), **schema}
        began_s = time.perf_counter()
        try:
            grammar = grammars.compile(json_constraint(schema))
        except InvalidRequest as error:
            found.wrong("refused", schema, str(error))
            continue
        finally:
            found.compile_s.append(time.perf_counter() - began_s)
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
        text = json.dumps(value, ensure_ascii=False)
        if walker.allows(grammar, text):
            found.counts["valid and allowed"] += 1
        else:
            found.wrong("valid and not allowed", schema, text)
        output = walker.output(grammar, rng)
        if output is None:
            found.counts["output given up"] += 1
            continue
        try:
            checker = jsonschema.FormatChecker()
            jsonschema.validate(json.loads(output), schema, format_checker=checker)
        except (ValueError, jsonschema.ValidationError) as error:
            found.wrong("output invalid", schema, f"{output} {str(error)[:200]}")
        else:
            found.counts["output valid"] += 1
    return found


class Walker:
    """Goes through grammars token by token."""

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_id
        texts = [tokenizer.token_text(token_id) for token_id in range(tokenizer.vocab_size)]
        self._ends = np.array([bool(text) and text[0] in '"}],' for text in texts])
        self._ends[eos_token_id] = True

    def output(self, grammar: Grammar, rng: random.Random) -> str | None:
        """A text of allowed tokens, up to the end; ``None`` where that does not come."""
        matcher, token_ids = grammar.matcher(), list[int]()
        while len(token_ids) < _LONGEST:
            bits = np.unpackbits(matcher.mask_W.view(np.uint8), bitorder="little")
            allowed_V = bits[: len(self._ends)].astype(bool)
            if len(token_ids) > _LONG and (allowed_V & self._ends).any():
                allowed_V &= self._ends
            token_id = int(rng.choice(np.flatnonzero(allowed_V)))
            if token_id == self._eos:
                return self._tokenizer.decode(token_ids, skip_special_tokens=False)
            token_ids.append(token_id)
            matcher.consume([token_id])
            matcher.fill()
            if matcher.error is not None:
                return None
        return None

    def allows(self, grammar: Grammar, text: str) -> bool:
        """Whether ``text`` is allowed, in tokens as they come; where text is forced, the library
        allows the one token with which its own cut goes on."""
        matcher = grammar.matcher()
        while text:
            token_id = self._tokenizer.encode(text)[0]
            if not _has(matcher.mask_W, token_id):
                bits = np.unpackbits(matcher.mask_W.view(np.uint8), bitorder="little")
                if bits.sum() != 1:
                    return False
                token_id = int(bits.argmax())
            piece = self._tokenizer.token_text(token_id)
            if not text.startswith(piece):
                return piece.startswith("bytes:")  # A part of a character: not followed further.
            matcher.consume([token_id])
            matcher.fill()
            text = text[len(piece) :]
        return _has(matcher.mask_W, self._eos)


def _has(mask_W: Ints, token_id: int) -> bool:
    return bool(mask_W[token_id // 32] >> (token_id % 32) & 1)


def draw_object(rng: random.Random, depth: int) -> Drawn:
    """An object with a few properties of all kinds."""
    defined: list[Schema] = []
    schema, value = _draw_object(rng, depth, defined)
    if defined:
        schema["$defs"] = {str(index): each for index, each in enumerate(defined)}
    return schema, value


def _draw_object(rng: random.Random, depth: int, defined: list[Schema]) -> Drawn:
    names = rng.sample(_NAMES, rng.randint(1, 5))
    drawn = {name: _draw_value(rng, depth - 1, defined) for name in names}
    required = rng.sample(sorted(drawn), rng.randint(0, len(drawn)))
    schema: Schema = {
        "type": "object",
        "properties": {name: each for name, (each, _) in drawn.items()},
        "required": required,
    }
    value = {
        name: each for name, (_, each) in drawn.items() if name in required or rng.random() < 0.5
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    elif rng.random() < 0.5:
        schema["additionalProperties"], extra = _draw_scalar(rng)
        value["extra"] = extra
    return schema, value


def _draw_value(rng: random.Random, depth: int, defined: list[Schema]) -> Drawn:
    kind = rng.random() if depth else 1.0
    if kind < 0.2:
        return _draw_object(rng, depth, defined)
    if kind < 0.4:
        item, value = _draw_value(rng, depth - 1, defined)
        least = rng.randint(0, 2)
        return {"type": "array", "items": item, "minItems": least, "maxItems": 4}, [value] * max(
            least, rng.randint(0, 4)
        )
    if kind < 0.5:
        drawn = [_draw_scalar(rng) for _ in range(3)]
        return {"anyOf": [schema for schema, _ in drawn]}, rng.choice(drawn)[1]
    if kind < 0.6:
        schema, value = _draw_value(rng, depth - 1, defined)
        defined.append(schema)
        return {"$ref": f"#/$defs/{len(defined) - 1}"}, value
    return _draw_scalar(rng)


def _draw_scalar(rng: random.Random) -> Drawn:
    least = rng.randint(-1000, 1000)
    most = least + rng.randint(0, 1000)
    values = [rng.choice([rng.random(), rng.randint(0, 99), _text(rng, 6), True, None])] * 1
    values += [_text(rng, 8) for _ in range(rng.randint(0, 20))]
    low, high = sorted(rng.sample(range(20), 2))
    day = date(2000, 1, 1) + timedelta(rng.randint(0, 20_000))
    made: Sequence[Callable[[], Drawn]] = (
        lambda: ({"type": "string"}, _text(rng, 20)),
        lambda: (
            {"type": "string", "minLength": low, "maxLength": high},
            "".join(rng.choices('aß€😀 \n"\\', k=rng.randint(low, high))),
        ),
        lambda: (
            {"type": "string", "pattern": r"^[A-Z]{2,5}-\d+$"},
            "".join(rng.choices(string.ascii_uppercase, k=3)) + "-" + str(rng.randint(0, 999)),
        ),
        lambda: ({"type": "string", "format": "date"}, day.isoformat()),
        lambda: ({"type": "string", "format": "uuid"}, str(uuid.UUID(int=rng.getrandbits(128)))),
        lambda: ({"type": "string", "format": "email"}, "a.b@example.org"),
        lambda: (
            {"type": "string", "format": "ipv4"},
            str(ipaddress.IPv4Address(rng.getrandbits(32))),
        ),
        lambda: ({"type": "integer"}, rng.randint(-(10**9), 10**9)),
        lambda: ({"type": "integer", "minimum": least, "maximum": most}, rng.randint(least, most)),
        lambda: ({"type": "integer", "exclusiveMinimum": least}, rng.randint(least + 1, 10**6)),
        lambda: ({"type": "integer", "multipleOf": 7, "minimum": 0}, 7 * rng.randint(0, 999)),
        lambda: ({"type": "number"}, rng.choice([0.0, -1.5e-7, 12, 1e20, rng.random()])),
        lambda: (
            {"type": "number", "minimum": least / 8, "maximum": most / 8},
            rng.randint(least, most) / 8,
        ),
        lambda: ({"type": ["boolean", "null"]}, rng.choice([True, False, None])),
        lambda: ({"enum": values}, rng.choice(values)),
        lambda: ({"const": values[0]}, values[0]),
    )
    return rng.choice(made)()


def _text(rng: random.Random, most: int) -> str:
    return "".join(rng.choices(string.printable + "éß漢😀", k=rng.randint(0, most)))


if __name__ == "__main__":
    main()
