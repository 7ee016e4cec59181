"""One model at a gateway: its service, with a routing table and connections to its groups."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from quire.cluster.config import ClusterConfig
from quire.cluster.gateway.config import GatewayConfig
from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.gateway.prepare import Abilities
from quire.cluster.gateway.service import ModelService
from quire.cluster.links.group_client import GroupClientConfig
from quire.cluster.links.group_link import GroupContact, grpc_connect
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.table import RoutingTable
from quire.worker.model.hub import fetch_text_files
from quire.worker.model.sentence_folder import read_scoring, read_use
from quire.worker.request.scoring import EmbeddingUse, Scoring
from quire.worker.request.settings import part
from quire.worker.text.tokenizer import Tokenizer


def new_table(
    config: ClusterConfig, make: Callable[..., RoutingTable] = RoutingTable
) -> RoutingTable:
    """A routing table whose policies draw different random numbers than those of other gateways."""
    return make(
        block_size=config.engine.block_size,
        config=config.routing,
        first_ordinal=random.getrandbits(32),
    )


@dataclass(frozen=True, kw_only=True)
class ReadModel:
    """The data that a gateway reads from a model's files."""

    config: ClusterConfig
    """The settings of this model alone."""
    tokenizer: Tokenizer
    scoring: Scoring | None
    use: EmbeddingUse


def read_model(config: ClusterConfig) -> ReadModel:
    """Reads a model's files, which may take seconds. Raises CheckpointError: they cannot be fetched
    or read."""
    folder = fetch_text_files(config.engine.model)
    tokenizer = Tokenizer.load(folder, chat_template=config.chat_template)
    scoring, use = read_scoring(folder), read_use(folder)
    return ReadModel(config=config, tokenizer=tokenizer, scoring=scoring, use=use)


class ServedModel:
    """A model's service with its groups. It is made inside the event loop;
    `quire.cluster.gateway.models.Models` closes the service."""

    def __init__(self, read: ReadModel, *, table: RoutingTable) -> None:
        config = read.config
        keeper = None
        if config.engine.enable_lora:
            # It imports parts of an engine, which other gateways do without.
            from quire.cluster.features.adapters.node import NodeAdapters

            keeper = NodeAdapters(config.engine, chat_template=config.chat_template)
        self._contacts: dict[str, GroupContact] = {}  # By address.
        groups = Groups(
            table=table,
            expected=Expectation(model=config.model_name, block_size=config.engine.block_size),
            config=GroupClientConfig(
                silence_timeout_s=config.silence_timeout_s,
                step_deadline_s=config.step_deadline_s,
                follow_events=config.routing.use_directory,
            ),
            connect=partial(grpc_connect, contacts=self._contacts),
            contacts=self._contacts,
            adapter_folder=keeper.folder if keeper is not None else lambda digest: None,
        )
        self.service = ModelService(
            model=config.model_name,
            tokenizer=read.tokenizer,
            abilities=Abilities(scoring=read.scoring, use=read.use, keeper=keeper),
            groups=groups,
            table=table,
            config=_gateway_config(config),
        )

    def set_groups(self, contacts: Iterable[GroupContact]) -> None:
        """Replaces the model's running groups."""
        running = {contact.address: contact for contact in contacts}
        self._contacts.update(running)
        self.service.groups.set_addresses(running)
        # Groups that leave still lend blocks to the groups that take over their requests.
        known = {client.address for client in self.service.groups.clients}
        for address in self._contacts.keys() - known:
            del self._contacts[address]


def _gateway_config(config: ClusterConfig) -> GatewayConfig:
    settings = config.autoscaling
    completion = part(CompletionConfig, config)
    wakes_groups = settings is not None and not settings.min_groups
    if settings is not None and wakes_groups:
        # A request may have to wait for the first group to start.
        completion = replace(completion, group_wait_s=settings.start_wait_s)
    return GatewayConfig(
        wakes_groups=wakes_groups,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        completion=completion,
        admission=config.admission(),
    )
