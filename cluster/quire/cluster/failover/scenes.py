"""Other requests that may have killed a group that died under a suspect.

A suspect runs on a group without another suspect, so its group's death is probably its own. But
other requests run there too, and one of them may be the killer: a second poison request, or a
completion of the first one that is not suspected yet. So the verdict, and the suspect, wait until
the requests that had not got past the beginning of their attempts there have done so elsewhere. If
one of them kills another group first, it is the likelier cause. Only requests of this gateway are
known here.
"""

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from quire.cluster.errors import Death

_MAX_DEATHS = 64
"""Deaths that are remembered: many more than are judged at a time."""


class Party(Protocol):
    """One completion."""

    @property
    def blame(self) -> object:
        """The same one for all completions of a prompt."""

    @property
    def num_attempts(self) -> int: ...

    @property
    def num_killed(self) -> int:
        """Groups that died under completions of its prompt before they were past the beginning."""

    @property
    def is_past(self) -> bool:
        """Whether its attempt has got past its beginning."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or its client left: it can kill no further group."""


class Verdict(Enum):
    OPEN = "somebody is not past its beginning yet"
    GUILTY = "everybody else is"
    DOUBTFUL = "somebody else has killed another group, or it died with others"


@dataclass(frozen=True, slots=True)
class _Presence:
    """The state of a party when a group died."""

    party: weakref.ref[Party]
    num_attempts: int
    num_killed: int

    def verdict(self) -> Verdict:
        """The verdict on another party."""
        party = self.party()
        if party is None:
            return Verdict.GUILTY
        if party.num_killed > self.num_killed:
            return Verdict.DOUBTFUL
        is_past = party.num_attempts > self.num_attempts and party.is_past
        return Verdict.GUILTY if is_past or party.is_over else Verdict.OPEN


class Scenes:
    """The gateway's dead groups, and the requests that ran on each."""

    def __init__(self) -> None:
        self._present: OrderedDict[tuple[str, int], list[_Presence]] = OrderedDict()

    def add(self, death: Death, party: Party) -> None:
        """``party`` was there, had not got past its beginning, and has counted the death."""
        key = (death.group, death.epoch)
        presence = _Presence(weakref.ref(party), party.num_attempts, party.num_killed)
        self._present.setdefault(key, []).append(presence)
        if len(self._present) > _MAX_DEATHS:
            self._present.popitem(last=False)

    def verdict(self, death: Death, suspect: Party) -> Verdict:
        """On ``suspect``, which was there, from what those of other prompts have done since."""
        verdicts = {
            presence.verdict()
            for presence in self._present.get((death.group, death.epoch), ())
            if (party := presence.party()) is not None and party.blame is not suspect.blame
        }
        for verdict in (Verdict.DOUBTFUL, Verdict.OPEN):
            if verdict in verdicts:
                return verdict
        return Verdict.GUILTY
