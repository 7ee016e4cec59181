"""Translates llama.cpp's grammars (GBNF), which are about characters, to Lark's syntax for
llguidance, whose lexer takes the longest terminal.

If each character were a terminal of its own, the lexer would have no choice, but masks of large
vocabularies would exceed llguidance's limits. So a part of the grammar without recursion is one
terminal if the lexer provably ends it where the grammar does. Otherwise it is split into smaller
parts: if a text of some terminal is a beginning of one of its texts, and the character behind that
beginning may also follow the other terminal. A grammar without recursion is one terminal.
"""

from collections.abc import Iterator

from quire.worker.text.grammar.gbnf import (
    Characters,
    Choice,
    Node,
    Repeat,
    Rule,
    Sequence,
    children,
    parse,
    rules_in,
)
from quire.worker.text.grammar.gbnf_terminal import (
    Alphabet,
    Terminal,
    bits_of,
    chosen,
    joined,
    pattern_of,
    repeated,
    times,
    union,
    union_at,
)

_MAX_RULES = 1_000
_MAX_POSITIONS = 2_000
"""Most positions of a terminal."""
_MAX_SHORT = 16
"""Most parts of a sequence that loses only its last part when it is split."""
_MAX_WORK = 300_000
"""Most steps to compare terminals: about 0.3 s, in which the GIL is held."""


def lark_of(grammar: str) -> str:
    """``grammar`` in Lark's syntax. Raises ValueError if it is invalid or too large."""
    num_rules = grammar.count("::=")
    if num_rules > _MAX_RULES:
        raise ValueError(f"{num_rules} rules are too many: write at most {_MAX_RULES}")
    return _Translation(parse(grammar)).written()


class _Translation:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._alphabet = Alphabet(rules.values())
        self._split: set[str] = set()
        """Patterns that are no terminals, because the lexer would not always end them correctly."""
        self._work = 0.0
        self._pieces_of: dict[Node, tuple[Node, ...]] = {}
        self._terminals: dict[Node, Terminal | None] = {}
        """Each part as a terminal, or ``None`` if it is recursive or too large."""
        self._of_rules: dict[str, Terminal | None] = {}
        for rule in self._rules_without_recursion():
            self._of_rules[rule] = self._terminal(rules[rule])
        self._edges = self._find_edges()

    def written(self) -> str:
        while wrong := self._wrong(self._find_follow()):
            self._split |= wrong
        return self._lark()

    def _rules_without_recursion(self) -> Iterator[str]:
        """Each one behind those that it refers to."""
        needs = {name: set(rules_in(node)) for name, node in self._rules.items()}
        users: dict[str, list[str]] = {name: [] for name in needs}
        for name, needed in needs.items():
            for each in needed:
                users[each].append(name)
        ready = [name for name, needed in needs.items() if not needed]
        while ready:
            done = ready.pop()
            yield done
            for user in users[done]:
                needs[user].discard(done)
                if not needs[user]:
                    ready.append(user)

    def _used(self, node: Node) -> Terminal | None:
        """The terminal for ``node``, unless it is split into smaller ones."""
        terminal = self._terminal(node)
        return None if terminal is None or terminal.pattern in self._split else terminal

    def _terminal(self, node: Node) -> Terminal | None:
        if isinstance(node, Rule):
            return self._of_rules.get(node.name)
        if node not in self._terminals:
            self._terminals[node] = self._built(node)
        return self._terminals[node]

    def _pieces(self, node: Node) -> tuple[Node, ...]:
        """The parts into which ``node`` is split. A long one is halved. A short sequence loses its
        last part, which is often space that may also follow."""
        parts = children(node)
        if len(parts) < 3 or not isinstance(node, Sequence | Choice):
            return parts
        if node not in self._pieces_of:
            is_short = isinstance(node, Sequence) and len(parts) <= _MAX_SHORT
            cut = len(parts) - 1 if is_short else len(parts) // 2
            halves = parts[:cut], parts[cut:]
            made = (type(node)(half) if len(half) > 1 else half[0] for half in halves)
            self._pieces_of[node] = tuple(made)
        return self._pieces_of[node]

    def _built(self, node: Node) -> Terminal | None:
        if isinstance(node, Characters):
            return Terminal(pattern_of(node), [self._alphabet.bits(node)], 1, 1, [0], False)
        if len(children(node)) > _MAX_POSITIONS:
            return None
        found = [self._terminal(child) for child in children(node)]
        parts = [each for each in found if each is not None]
        num_positions = sum(len(each.characters) for each in parts)
        if len(parts) < len(found) or num_positions > _MAX_POSITIONS:
            return None
        self._spend(0.5 * num_positions)
        if isinstance(node, Repeat):
            return repeated(parts[0], node)
        return joined(parts) if isinstance(node, Sequence) else chosen(parts)

    def _find_edges(self) -> dict[str, tuple[int, bool]]:
        """The characters with which each rule's texts begin, and whether one is empty."""
        self._edges = dict.fromkeys(self._rules, (0, False))
        is_changed = True
        while is_changed:
            is_changed = False
            for name, node in self._rules.items():
                found = self._edge(node)
                is_changed |= found != self._edges[name]
                self._edges[name] = found
        return self._edges

    def _edge(self, node: Node) -> tuple[int, bool]:
        self._spend(1)
        terminal = self._terminal(node)
        if terminal is not None:
            return union_at(terminal.characters, terminal.first), terminal.is_empty
        if isinstance(node, Rule):
            return self._edges[node.name]
        found = [self._edge(piece) for piece in self._pieces(node)]
        if isinstance(node, Choice):
            return union(each for each, _ in found), any(is_empty for _, is_empty in found)
        if isinstance(node, Repeat):
            return found[0][0], found[0][1] or node.least == 0
        characters = 0
        for more, is_empty in found:
            characters |= more
            if not is_empty:
                return characters, False
        return characters, True

    def _find_follow(self) -> dict[str, tuple[Terminal, int]]:
        """The terminals by pattern, each with the characters that may follow it."""
        behind: dict[str, int] = {}  # By rule that is no terminal.
        found: dict[str, tuple[Terminal, int]] = {}

        def visit(node: Node, follow: int) -> None:
            self._spend(1)
            terminal = self._used(node)
            if terminal is not None:
                before = found.get(terminal.pattern, (terminal, 0))[1]
                found[terminal.pattern] = terminal, before | follow
            elif isinstance(node, Rule):
                if node.name not in behind or follow & ~behind[node.name]:
                    behind[node.name] = behind.get(node.name, 0) | follow
                    waiting.append(node.name)
            else:
                if isinstance(node, Repeat) and node.most != 1:
                    follow |= self._edge(node.node)[0]
                for piece in reversed(self._pieces(node)):
                    visit(piece, follow)
                    if isinstance(node, Sequence):
                        characters, is_empty = self._edge(piece)
                        follow = characters | (follow if is_empty else 0)

        waiting: list[str] = []
        visit(Rule("root"), 0)
        while waiting:
            name = waiting.pop()
            visit(self._rules[name], behind[name])
        return found

    def _wrong(self, follow: dict[str, tuple[Terminal, int]]) -> set[str]:
        """The patterns of the terminals that the lexer would not always end correctly."""
        begins = {
            pattern: union_at(one.characters, one.first) for pattern, (one, _) in follow.items()
        }
        long = {
            pattern: (self._alphabet.leads(union_at(one.characters, union(one.after))), one)
            for pattern, (one, _) in follow.items()
            if any(one.after)
        }
        wrong = set()
        for pattern, (one, characters) in follow.items():
            leads = self._alphabet.leads(characters)
            for name, (inner, other) in long.items():
                self._spend(0.1)
                if (
                    leads & inner
                    and begins[pattern] & begins[name]
                    and name not in wrong
                    and self._continues(one, other, leads)
                ):
                    wrong.add(name)
        return wrong

    def _continues(self, one: Terminal, other: Terminal, leads: int) -> bool:
        """Whether a text of ``one`` is a beginning of a text of ``other``, whose next character
        begins with one of the bytes ``leads``."""
        continuing = [
            bool(self._alphabet.leads(union_at(other.characters, behind)) & leads)
            for behind in other.after
        ]
        seen = [0] * len(one.characters)  # Positions of `other`, by position of `one`.
        waiting = [(position, other.first) for position in bits_of(one.first)]
        while waiting:
            position, places = waiting.pop()
            new = 0
            for place in bits_of(places & ~seen[position]):
                self._spend(1)
                if one.characters[position] & other.characters[place]:
                    if one.last >> position & 1 and continuing[place]:
                        return True
                    new |= 1 << place
            seen[position] |= places
            behind = union_at(other.after, new)
            if behind:
                waiting += [(each, behind) for each in bits_of(one.after[position])]
        return False

    def _lark(self) -> str:
        names = {name: f"r{index}" for index, name in enumerate(self._rules)}
        terminals: dict[str, str] = {}
        used: list[str] = []

        def written(node: Node) -> str:
            terminal = self._used(node)
            if terminal is not None:
                if not terminal.characters:
                    return '""'
                definition = f"/{terminal.pattern}/"
                if terminal.is_empty:  # The lexer has no empty terminals.
                    definition += " & /(?s:.)+/"
                name = terminals.setdefault(definition, f"T{len(terminals)}")
                return f"{name}?" if terminal.is_empty else name
            match node:
                case Rule(name):
                    if name not in used:
                        used.append(name)
                    return names[name]
                case Repeat(inner, least, most):
                    return f"({written(inner)}){times(least, most)}"
            sign = " | " if isinstance(node, Choice) else " "
            return f"({sign.join(map(written, self._pieces(node)))})"

        lines = [f"start: {written(Rule('root'))}"]
        lines += (f"{names[name]}: {written(self._rules[name])}" for name in used)
        lines += (f"{name}: {definition}" for definition, name in terminals.items())
        return "\n".join([*lines, ""])

    def _spend(self, work: float) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise ValueError("the grammar is too large: write fewer rules and alternatives")
