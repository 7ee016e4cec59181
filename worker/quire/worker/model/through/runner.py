"""Runs a transformers model as a `quire.kernels.ops.ProgramRunner`: the model's own modules compute
a packed step, and its attention reads and writes Quire's KV cache."""

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import logging

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.backend import AttentionBackend
from quire.kernels.batch import Batch, GreedyEdits, WantedColumns
from quire.kernels.ops import KvCache
from quire.worker.model.pooling import Pooling, PoolingMode
from quire.worker.model.spec import Attention, ModelSpec
from quire.worker.model.through.classes import (
    auto_class,
    no_pooler,
    packed_part,
    transformers_config,
)
from quire.worker.model.through.dry_run import Found
from quire.worker.model.through.modules import install
from quire.worker.model.through.state import state_of
from quire.worker.request.errors import CheckpointError
from quire.worker.weights.loader import Weights
from quire.worker.weights.tokenizer_config import gives_types, named_token_id, read_config

# T tokens of the step, packed   S rows that are sampled   H query heads   K KV heads   D head size

_NAME = "quire"
_OTHER_TASKS = (
    r"(^|\.)pooler\.",
    r"(^|\.)embeddings\.position_ids$",
    r"^(cls|classifier|lm_head|head|decoder|predictions|score|vocab_\w+)\.",
)
"""Tensors of encoders that embeddings do not need."""


class ThroughTransformers:
    """A whole model on one rank. Not thread-safe."""

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
        """Reads the weights. ``options`` has one entry per layer.

        Raises:
            CheckpointError: Tensors are missing or unused, have a wrong shape, or have values that
                are NaN or infinite.
        """
        whole = _read(weights, spec)
        self._model = packed_part(whole, spec)
        self._model.name_or_path = whole.name_or_path
        install(self._model, found.plan, backend, device)
        self._step = _Step(backend)
        for number, name in enumerate(found.modules):
            module = self._model.get_submodule(name)
            module.quire_step = self._step
            module.quire_layer = (number, found.attentions[number], options[number])
        self._first_position = spec.first_position
        self._pooling = spec.pooling if spec.is_encoder else None
        self._types = None
        if self._pooling is not None and self._pooling.reads_pairs:
            self._types = _Types(whole.config, path=weights.checkpoint.path)
        if spec.is_classifier:
            self._classifier = _Classifier(whole, self._model)
            self._classifier.model.to(device)
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

    def _encode(self, batch: Batch, pooling: Pooling) -> Tensor:
        """Sets the vector of each sequence, all of which are whole; returns no logits."""
        bounds = list(pairwise(batch.query_starts_B1.tolist()))
        more = {}
        if self._types is not None:
            more = self._types.of(batch.token_ids_T, bounds)
        states_TC: Tensor = self._model(
            input_ids=batch.token_ids_T[None],
            position_ids=self._positions(batch, bounds)[None],
            **more,
        ).last_hidden_state[0]
        if batch.hidden is not None:
            begins = {end - 1: begin for begin, end in bounds}
            ends = batch.last_tokens_S[batch.hidden.rows_H].tolist()
            texts = [slice(begins[end], end + 1) for end in ends]
            batch.hidden.values_HC = torch.stack(
                [
                    self._classifier.logits(states_TC[text], batch.token_ids_T[text])
                    for text in texts
                ]
                if pooling.modes == ("classifier",)
                else [
                    torch.cat([_pooled(states_TC[text], mode) for mode in pooling.modes])
                    for text in texts
                ]
            )
        return states_TC.new_empty(len(batch.last_tokens_S), 0)

    def _positions(self, batch: Batch, bounds: list[tuple[int, int]]) -> Tensor:
        """The position ids of all texts."""
        if not self._first_position:
            return batch.positions_T
        padding = self._first_position - 1
        counts_T = (batch.token_ids_T != padding).to(batch.positions_T.dtype)
        positions = [counts_T[begin:end].cumsum(0) for begin, end in bounds]
        return torch.cat(positions).to(counts_T.dtype) * counts_T + padding


class _Types:
    """Tells the two texts of a pair apart, if the model and its tokenizer do."""

    def __init__(self, config: Any, *, path: Path) -> None:
        has_types = getattr(config, "type_vocab_size", 1) > 1 and gives_types(read_config(path))
        self._separator = named_token_id(path, "sep_token") if has_types else None

    def of(self, token_ids_T: Tensor, bounds: list[tuple[int, int]]) -> dict[str, Tensor]:
        """Token type ids: 0 up to a text's first separator, 1 after it; empty if unused."""
        if self._separator is None:
            return {}
        behind_T = (token_ids_T == self._separator).long()
        types = [
            (behind_T[begin:end].cumsum(0) - behind_T[begin:end]).clamp(max=1)
            for begin, end in bounds
        ]
        return {"token_type_ids": torch.cat(types)[None]}


class _Classifier:
    """The classifier after an encoder, which runs on one text at a time."""

    def __init__(self, model: Any, encoder: Any) -> None:
        self.model = model
        self._states = _States(getattr(encoder, "pooler", None))
        setattr(model, model.base_model_prefix, self._states)

    def logits(self, states_LC: Tensor, token_ids_L: Tensor) -> Tensor:
        """One logit for each label, float32."""
        self._states.states_1LC = states_LC[None]
        ids_1L = token_ids_L[None]
        logits_1O = self.model(input_ids=ids_1L, attention_mask=torch.ones_like(ids_1L)).logits
        made: Tensor = logits_1O[0].float()
        return made


class _States(torch.nn.Module):
    """Replaces the encoder in a model with a classifier: returns states computed before."""

    states_1LC: Tensor

    def __init__(self, pooler: Any) -> None:
        super().__init__()
        self._pooler = pooler

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPooling:
        pooled = None if self._pooler is None else self._pooler(self.states_1LC)
        return BaseModelOutputWithPooling(last_hidden_state=self.states_1LC, pooler_output=pooled)


class _Step:
    """The data of the current step that attention reads."""

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
        # If K and V differ in size, the cache has the greater; padding zeros change no score.
        size = attention.cached_size
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


def _pooled(states_LC: Tensor, mode: PoolingMode) -> Tensor:
    match mode:
        case "cls":
            return states_LC[0].float()
        case "last":
            return states_LC[-1].float()
        case "max":
            return states_LC.max(0).values.float()
    # In float64, the effect of torch's order of the sum is lost in rounding.
    states_LC = states_LC.double()
    if mode == "weighted_mean":
        weights_L = torch.arange(1, len(states_LC) + 1, device=states_LC.device).double()
        return ((states_LC * weights_L[:, None]).sum(0) / weights_L.sum()).float()
    divisor = math.sqrt(len(states_LC)) if mode == "mean_sqrt" else len(states_LC)
    return (states_LC.sum(0) / divisor).float()


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
