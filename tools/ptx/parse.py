"""Parses PTX text, as Triton's compiler writes it, into instructions by basic block.

It supports one ``.entry`` with its parameters, registers, labels, scopes of inline assembly with
their own registers, and ``.loc`` lines, which give an instruction's place in the Python source.
Debug sections are skipped.
"""

import re
from dataclasses import dataclass, field

WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}


@dataclass(frozen=True, kw_only=True)
class Instruction:
    opcode: tuple[str, ...]
    """Parted at its dots: ``("ld", "global", "v4", "b32")``."""
    operands: tuple[str, ...]
    """A vector keeps its braces, an address its brackets."""
    guard: str | None
    """The predicate that a thread needs to take part, None where all do."""
    negated: bool
    """Whether the guard must be false instead."""
    text: str
    source: str
    """``file:line:column`` of the Python source, empty where unknown."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Instructions that run one after the other; only the last may be a jump, a barrier or the
    end. Then the next block follows."""

    instructions: list[Instruction]


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    parameters: list[tuple[str, str]]
    """Type (``u64``, ``f32`` ...) and name of each."""
    num_threads: int
    registers: dict[str, int]
    """The width in bits of each register; 1 for a predicate."""
    blocks: list[Block]
    labels: dict[str, int]
    """The block that each label begins."""


def parse(ptx: str) -> Program:
    """
    Raises:
        ValueError: The text holds no entry, or something of which it is not known what it is.
    """
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*([^{]*)\{", ptx, re.DOTALL)
    if entry is None:
        raise ValueError("no .entry in the PTX")
    name, parameters, attributes = entry.groups()
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", attributes)
    if threads is None:
        raise ValueError(f"{name}: neither .reqntid nor .maxntid says how many threads it has")
    reader = _Reader()
    for line in ptx[entry.end() :].splitlines():
        reader.read(line)
        if reader.is_done:
            break
    reader.end_block()
    return Program(
        name=name,
        parameters=re.findall(r"\.param\s+\.(\w+)(?:\s+\.ptr[^,\n]*?)?\s+([\w$]+)\s*(?:,|$)",
                              parameters, re.MULTILINE),
        num_threads=int(threads[1]),
        registers=reader.registers,
        blocks=reader.blocks,
        labels=reader.labels,
    )  # fmt: skip


_LABEL = re.compile(r"([$\w]+)\s*:(?!:)\s*")
_STATEMENT = re.compile(r"(?:@(!?)([%\w]+)\s+)?(\S+)\s*(.*)$", re.DOTALL)
_DIRECTIVES = (".loc", ".file", ".section", ".pragma")
_ENDS = ("bra", "ret", "exit", "bar", "barrier")


@dataclass
class _Reader:
    registers: dict[str, int] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    _current: list[Instruction] = field(default_factory=list)
    _scopes: list[dict[str, str]] = field(default_factory=lambda: [{}])
    """What each open scope calls its registers, innermost last."""
    _num_scopes: int = 0
    _source: str = ""
    _rest: str = ""
    """The beginning of a statement that goes on in the next line."""

    @property
    def is_done(self) -> bool:
        """Whether the brace was closed that the entry's body began with."""
        return not self._scopes

    def read(self, line: str) -> None:
        code, _, comment = line.partition("//")
        if code.lstrip().startswith(_DIRECTIVES):
            if ".loc" in code:
                self._source = comment.strip()
            return
        text = (self._rest + " " + code).strip()
        self._rest = ""
        while text:
            if text[0] == "{":
                self._num_scopes += 1
                self._scopes.append({})
                text = text[1:].lstrip()
            elif text[0] == "}":
                self._scopes.pop()
                text = text[1:].lstrip()
                if self.is_done:
                    return
            elif label := _LABEL.match(text):
                self.end_block()
                self.labels[label[1]] = len(self.blocks)
                text = text[label.end() :]
            else:
                statement, semicolon, after = text.partition(";")
                if not semicolon:
                    self._rest = text
                    return
                self._statement(statement.strip())
                text = after.lstrip()

    def end_block(self) -> None:
        if self._current:
            self.blocks.append(Block(instructions=self._current))
            self._current = []

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
            return
        if not text or text.startswith("."):
            return
        match = _STATEMENT.match(text)
        assert match is not None
        negated, guard, opcode, operands = match.groups()
        instruction = Instruction(
            opcode=tuple(opcode.replace("::", ":").split(".")),
            operands=tuple(self._rename(operand) for operand in split_operands(operands)),
            guard=None if guard is None else self._rename(guard),
            negated=bool(negated),
            text=" ".join(text.split()),
            source=self._source,
        )
        self._current.append(instruction)
        if instruction.opcode[0] in _ENDS and instruction.opcode[1:2] != ("warp",):
            self.end_block()

    def _declare(self, text: str) -> None:
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)$", text, re.DOTALL)
        if match is None:
            raise ValueError(f"registers of no known kind: {text}")
        kind, names = match.groups()
        width = WIDTHS.get(kind) or int(kind.lstrip("usfb"))
        suffix = f"@{self._num_scopes}" if len(self._scopes) > 1 else ""
        for name in (name.strip() for name in names.split(",")):
            counted = re.match(r"(.+)<(\d+)>$", name)
            all_names = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            for one in all_names:
                self._scopes[-1][one] = one + suffix
                self.registers[one + suffix] = width

    def _rename(self, operand: str) -> str:
        """The operand with the registers of inner scopes under the names that they have here."""
        if len(self._scopes) == 1:
            return operand
        inner: dict[str, str] = {}
        for scope in self._scopes[1:]:
            inner.update(scope)
        return re.sub(r"[%$\w]+", lambda name: inner.get(name[0], name[0]), operand)


def split_operands(text: str) -> list[str]:
    """Parts at the commas that are in no braces and no brackets."""
    parts, depth, part = [], 0, ""
    for character in text:
        depth += (character in "{[") - (character in "}]")
        if character == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += character
    return [*parts, part.strip()] if part.strip() else parts
