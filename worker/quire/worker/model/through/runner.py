"""A transformers model as a `quire.kernels.ops.ProgramRunner`: its own modules compute a packed
step, and its attention reads and writes Quire's KV cache."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.utils import logging

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import AttentionBackend
from quire.kernels.ops import Batch, GreedyEdits, KvCache, WantedColumns
from quire.worker.api.errors import CheckpointError
from quire.worker.model.loader import Weights
from quire.worker.model.pooling import PoolingKind
from quire.worker.model.spec import Attention, ModelSpec
from quire.worker.model.through.classes import auto_class, no_pooler, transformers_config
from quire.worker.model.through.dry_run import Found
from quire.worker.model.through.modules import install
from quire.worker.model.through.state import state_of

# T tokens of the step, packed   S rows that are sampled   H query heads   K KV heads   D head size

_NAME = "quire"
_OTHER_TASKS = (
    r"(^|\.)pooler\.",
    r"(^|\.)embeddings\.position_ids$",
    r"^(cls|lm_head|head|decoder|predictions|vocab_\w+)\.",
)
"""Tensors of encoders that no embedding needs."""


class ThroughTransformers:
    """One rank's whole model. Not for two threads at once."""

    chooses = False
    adapters = None

    def __init__(
        self,
        weights: Weights,
        spec: ModelSpec,
        found: Found,
        options: tuple[AttentionOptions, ...],
        *,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        """Reads the weights. ``options`` are each layer's.

        Raises:
            CheckpointError: Tensors are missing, misshapen, NaN or infinite, or nothing reads them.
        """
        self._model = _read(weights, spec)
        install(self._model, found.plan, backend, device)
        self._step = _Step(backend)
        for number, name in enumerate(found.modules):
            module = self._model.get_submodule(name)
            module.quire_step = self._step
            module.quire_layer = (number, found.attentions[number], options[number])
        self._first_position = spec.first_position
        self._pooling = spec.pooling.kind if spec.is_encoder and spec.pooling else None
        if self._pooling is None:
            head = self._model.get_output_embeddings()
            head.register_forward_pre_hook(self._step.take_hidden)

    def forward(
        self,
        batch: Batch,
        kv: KvCache,
        *,
        all_reduce: Callable[[Tensor], Tensor],
        greatest_G2: Tensor | None = None,
        edits: GreedyEdits | None = None,
        wanted: WantedColumns | None = None,
    ) -> Tensor:
        assert greatest_G2 is None, "`chooses` says so"
        assert wanted is None, "`chooses` says so"
        del all_reduce  # there is one rank
        self._step.batch, self._step.kv = batch, kv
        if self._pooling is not None:
            return self._encode(batch, self._pooling)
        logits_SV: Tensor = self._model(
            input_ids=batch.token_ids_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            logits_to_keep=batch.last_tokens_S.long(),
        ).logits[0]
        return logits_SV.float() if logits_SV.device.type == "cpu" else logits_SV

    def _encode(self, batch: Batch, pooling: PoolingKind) -> Tensor:
        """Fills in the vector of each sequence, all of which are whole; there are no logits."""
        states_TC: Tensor = self._model(
            input_ids=batch.token_ids_T[None],
            position_ids=batch.positions_T[None] + self._first_position,
        ).last_hidden_state[0]
        if batch.hidden is not None:
            starts = batch.query_starts_B1.tolist()
            begins = {end - 1: begin for begin, end in pairwise(starts)}
            ends = batch.last_tokens_S[batch.hidden.rows_H].tolist()
            batch.hidden.values_HC = torch.stack(
                [_pooled(states_TC[begins[end] : end + 1], pooling) for end in ends]
            )
        return states_TC.new_empty(len(batch.last_tokens_S), 0)


class _Step:
    """What attention reads of the step that runs."""

    batch: Batch
    kv: KvCache

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def take_hidden(self, _: object, inputs: tuple[Tensor, ...]) -> None:
        if self.batch.hidden is not None:
            self.batch.hidden.take(inputs[0][0])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        attention: Attention,
        options: AttentionOptions,
    ) -> Tensor:
        batch, (k_cache, v_cache) = self.batch, self.kv[layer]
        # K and V of two sizes have the greater one in the cache; zeros change no score.
        size = max(attention.key_size, attention.value_size)
        q_THD, k_TKD, v_TKD = (
            pad(x[0].transpose(0, 1), (0, size - x.shape[3]))
            if x.shape[3] < size
            else x[0].transpose(0, 1)
            for x in (query, key, value)
        )
        self._backend.write_kv(
            k_TKD, v_TKD, k_cache, v_cache, batch.slot_mapping_T, options=options
        )
        attended_THD = self._backend.attend(
            q_THD, k_cache, v_cache, batch, scale=attention.scale, options=options
        )
        return attended_THD[None, ..., : attention.value_size]


def _pooled(states_LC: Tensor, kind: PoolingKind) -> Tensor:
    match kind:
        case "cls":
            return states_LC[0].float()
        case "last":
            return states_LC[-1].float()
    # In float64 the order of the sum, which is torch's affair, is lost in rounding.
    return states_LC.double().mean(0).float()


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> tuple[Tensor, None]:
    step: _Step = module.quire_step
    return step.attend(query, key, value, *module.quire_layer), None


def _read(weights: Weights, spec: ModelSpec) -> Any:
    """The model with its weights, on the CPU."""
    AttentionInterface.register(_NAME, _attend)
    path = weights.checkpoint.path
    config = transformers_config(path, spec)
    loud: Any = logging
    has_bar = loud.is_progress_bar_enabled()
    verbosity = loud.get_verbosity()
    loud.disable_progress_bar()
    loud.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, report = (
                auto_class(spec)
                ._model_mapping[type(config)]
                .from_pretrained(
                    None,
                    config=config,
                    state_dict=state_of(weights),
                    dtype=weights.dtype,
                    attn_implementation=_NAME,
                    output_loading_info=True,
                    **no_pooler(config),
                )
            )
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: transformers cannot load it: {type(error).__name__}: {error}"
        ) from error
    finally:
        loud.set_verbosity(verbosity)
        if has_bar:
            loud.enable_progress_bar()
    for what in ("missing_keys", "mismatched_keys", "error_msgs"):
        if report.get(what):
            names = ", ".join(sorted(map(str, report[what]))[:5])
            raise CheckpointError(
                f"{path}: {what.replace('_', ' ')}: {names}; transformers' "
                f"{type(model).__name__} asks for them"
            )
    num_layers = config.num_hidden_layers
    extra = range(num_layers, num_layers + spec.num_extra_layers)
    known = [rf"^model\.layers\.{number}\." for number in extra]
    known += _OTHER_TASKS if spec.is_encoder else ()
    weights.refuse_unread(spec, known=(*known, *(model._keys_to_ignore_on_load_unexpected or ())))
    model.name_or_path = str(path)
    return model.eval()
