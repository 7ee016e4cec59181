"""The LoRA adapters that a gateway's clients can name as their model.

A name stands for one content at a time, identified by its digest. A request takes the digest when
it begins and keeps it to its end, also on other groups. All gateways know the same names: the one
that loads or unloads an adapter tells the others, and a new gateway asks them. The latest statement
about a name (`Word`) holds. The names in a model's configuration count as older than any other.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from quire.cluster.errors import ModelNotFound
from quire.cluster.features.adapters.keeper import Adapter, Keeper
from quire.cluster.gateway.service import ModelService
from quire.worker.request.errors import AdapterError, InvalidRequest, QuireError

if TYPE_CHECKING:
    from quire.cluster.gateway.models import Models

_log = logging.getLogger(__name__)

MAX_ADAPTERS = 4096
"""Most names in use; as many unloaded ones are remembered."""
MAX_NAME_CHARS = 256
_KEEP_TIMEOUT_S = 600.0
"""Time to fetch and check an adapter. No other adapter of the gateway can change meanwhile."""
_GROUPS_TIMEOUT_S = 60.0
"""Time for the groups to receive an adapter that is loaded; late groups get it later."""
_TELL_AGAIN_S = 2.0
_TELLINGS = 30


class Word(NamedTuple):
    """The latest statement about a name: which adapter it stands for, if any."""

    said_at: int
    """Time of the statement in nanoseconds since 1970; 0 if it is from the configuration."""
    name: str
    model: str
    source: str
    digest: str
    """The digest of the adapter; empty if the name was unloaded."""


TellOthers = Callable[[Sequence[Word]], Awaitable[str]]
"""Calls `Adapters.hear` of the other gateways. Returns which of them were not reached, as text;
empty if all were. Limits its own time."""
AskOthers = Callable[[], Awaitable[Iterable[Word]]]
"""Returns the words that other gateways know."""


class Adapters:
    """The adapters of one gateway. Belongs to one event loop."""

    def __init__(self, models: "Models") -> None:
        self.tell_others: TellOthers = _no_others
        """Tells other gateways; set by the owner if there are any."""
        self._models = models
        self._words: dict[str, Word] = {}
        self._configured_elsewhere: dict[str, Word] = {}
        self._adapters: dict[str, Adapter] = {}
        self._changing = asyncio.Lock()
        self._telling: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Adapter]:
        """The adapters of models that are served, sorted by name."""
        models = self._models.by_name
        return (each for _, each in sorted(self._adapters.items()) if each.model in models)

    def named(self, name: str) -> ModelService | None:
        """The service of the adapter's model, with the adapter; ``None`` if there is none."""
        adapter = self._adapters.get(name)
        service = None if adapter is None else self._models.by_name.get(adapter.model)
        if adapter is None or service is None:
            return None
        if adapter.held is None and service.keeper is not None:
            held = service.keeper.hold(adapter.digest)
            adapter = self._adapters[name] = replace(adapter, held=held)
        return service.through(adapter)

    async def load(self, name: str, source: str, *, model: str = "") -> tuple[Adapter, str]:
        """Serves the adapter at ``source`` as ``name``, in place of an adapter of that name.
        ``model`` is by default the only one that takes adapters. Returns the adapter, and which
        gateways do not know of it yet, as text. After an error nothing has changed.

        Raises:
            InvalidRequest: The name cannot be used, or the model takes no adapters or cannot run
                this one.
            ModelNotFound: There is no such model.
            AdapterError: The adapter cannot be fetched or read.
        """
        async with self._changing:
            service = self._model(model)
            self._check(name, source)
            assert service.keeper is not None, "the model takes adapters"
            digest = await _kept(service.keeper, source)
            await service.groups.hold_everywhere(digest, timeout_s=_GROUPS_TIMEOUT_S)
            word = Word(self._now(name), name, service.model, source, digest)
            self.hear([word])
            return self._adapters[name], await self._tell(word)

    async def unload(self, name: str) -> str:
        """Removes the name; requests that have begun continue. Returns which gateways do not know
        of it yet, as text.

        Raises:
            ModelNotFound: No adapter has the name.
        """
        async with self._changing:
            adapter = self._adapters.get(name)
            if adapter is None:
                known = ", ".join(map(repr, sorted(self._adapters))) or "none"
                raise ModelNotFound(f"the adapter {name!r} does not exist; there are: {known}")
            word = Word(self._now(name), name, adapter.model, adapter.source, "")
            self.hear([word])
            return await self._tell(word)

    async def configure(self, model: str, modules: Mapping[str, str]) -> None:
        """Serves a model's configured adapters, sources by name. Names that were loaded or unloaded
        since stay as they are. An adapter that cannot be read is logged and left out. One that
        another gateway has from the same source gets the digest that it has there.
        """
        async with self._changing:
            keeper = self._models.by_name[model].keeper
            assert keeper is not None, "the model takes adapters"
            for word in self.words():
                if not word.said_at and word.model == model and word.name not in modules:
                    del self._words[word.name], self._adapters[word.name]
            for name, source in modules.items():
                known = self._words.get(name)
                if known is not None and (known.said_at or known.source == source):
                    continue
                other = self._configured_elsewhere.get(name)
                if other is not None and (other.model, other.source) == (model, source):
                    word = other
                else:
                    try:
                        digest = await _kept(keeper, source)
                    except QuireError as error:
                        _log.error("the adapter %r of %s is not served: %s", name, model, error)
                        continue
                    word = Word(0, name, model, source, digest)
                self._take(word)

    def words(self) -> list[Word]:
        """All words that this gateway knows."""
        return list(self._words.values())

    def hear(self, words: Iterable[Word]) -> None:
        """Takes in words of another gateway; older words than the known ones are ignored."""
        for word in words:
            known = self._words.get(word.name)
            if not word.said_at:  # This gateway has a configuration of its own.
                self._configured_elsewhere[word.name] = word
            elif known is None or known.said_at < word.said_at:
                self._take(word)
        gone = sorted(word for word in self._words.values() if not word.digest)
        for word in gone[: max(0, len(gone) - MAX_ADAPTERS)]:
            del self._words[word.name]

    def give_up(self, names: Iterable[str]) -> None:
        """Unloads adapters with the names of models, which a new list of models may have brought:
        they must not answer again once the model of that name is removed."""
        for name in names:
            adapter = self._adapters.get(name)
            if adapter is not None:
                _log.error("the adapter %r is unloaded: a model has its name now", name)
                self.hear([Word(self._now(name), name, adapter.model, adapter.source, "")])

    def close(self) -> None:
        """Stops telling other gateways."""
        for task in self._telling:
            task.cancel()

    def _take(self, word: Word) -> None:
        self._words[word.name] = word
        if word.digest:
            self._adapters[word.name] = Adapter(
                name=word.name, model=word.model, source=word.source, digest=word.digest
            )
        else:
            self._adapters.pop(word.name, None)

    def _model(self, name: str) -> ModelService:
        taking = [each for each in self._models.by_name.values() if each.keeper is not None]
        if name:
            service = self._models.model(name)
        elif len(taking) == 1:
            (service,) = taking
        elif taking:
            known = ", ".join(repr(each.model) for each in taking)
            raise InvalidRequest(
                f"base_model_name is missing: name one of {known}", param="base_model_name"
            )
        else:
            raise InvalidRequest("no model here takes adapters: serve one with --enable-lora")
        if service.keeper is None:
            raise InvalidRequest(
                f"base_model_name={name!r} takes no adapters: serve it with --enable-lora",
                param="base_model_name",
            )
        return service

    def _check(self, name: str, source: str) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(
                f"lora_name={name[:MAX_NAME_CHARS]!r}: must have 1 to {MAX_NAME_CHARS} characters "
                "that can be printed",
                param="lora_name",
            )
        models = self._models
        if name in models.by_name or name in models.aliases or name in models.troubles:
            raise InvalidRequest(
                f"lora_name={name!r} is the name of a model: take another", param="lora_name"
            )
        if not source:
            raise InvalidRequest(
                "lora_path is empty: give a directory of the gateway's node, or a name on the hub",
                param="lora_path",
            )
        if name not in self._adapters and len(self._adapters) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"lora_name={name!r}: {MAX_ADAPTERS} adapters have names already, unload one",
                param="lora_name",
            )

    def _now(self, name: str) -> int:
        """A time later than that of the name's known word, even if clocks differ."""
        known = self._words.get(name)
        return max(time.time_ns(), known.said_at + 1 if known else 0)

    async def _tell(self, word: Word) -> str:
        """Tells the other gateways, and retries in the background if some were not reached."""
        incomplete = await self.tell_others([word])
        if incomplete:
            task = asyncio.create_task(self._tell_again(word))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        return incomplete

    async def _tell_again(self, word: Word) -> None:
        for _ in range(_TELLINGS):
            await asyncio.sleep(_TELL_AGAIN_S)
            is_news = self._words.get(word.name) == word
            if not (is_news and await self.tell_others([word])):
                return
        _log.warning("other gateways have not heard of the adapter %r", word.name)


async def _kept(keeper: Keeper, source: str) -> str:
    """The digest of the adapter at ``source``, which is kept. A thread that does not end in time is
    left behind. Raises as `Keeper.keep`."""
    try:
        async with asyncio.timeout(_KEEP_TIMEOUT_S):
            return await asyncio.to_thread(keeper.keep, source)
    except TimeoutError:
        raise AdapterError(
            f"{source}: was not read within {_KEEP_TIMEOUT_S:g} s: try again once its storage or "
            "the hub answers"
        ) from None


async def nobody_knows() -> Iterable[Word]:
    """The `AskOthers` of a gateway that is alone: no words."""
    return ()


async def _no_others(words: Sequence[Word]) -> str:
    return ""
