"""Runs a transformers model's forward pass on the device "meta", before its weights are read.

This records the attention of each layer, the matrices that it multiplies with, and every operation
between. A model that needs something that Quire's cache or kernels cannot do is refused here.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from quire.worker.model.spec import Attention, ModelSpec
from quire.worker.model.through.classes import (
    auto_class,
    no_pooler,
    packed_part,
    transformers_config,
)
from quire.worker.model.through.modules import Plan, install_for_dry_run, replaced_part
from quire.worker.model.through.products import NotALayer
from quire.worker.request.errors import CheckpointError
from quire.worker.weights.checkpoint import open_checkpoint

# T tokens   H query heads   K KV heads   D head size

_NAME = "quire_dry_run"
_NUM_TOKENS, _NUM_SAMPLES = 8, 3
_HARMLESS = ("position_ids", "cache_position")
_ROWWISE = frozenset(
    (
        *("view", "_unsafe_view", "_reshape_alias", "transpose", "permute", "unsqueeze", "squeeze"),
        *("expand", "slice", "select", "split", "split_with_sizes", "unbind", "alias", "t"),
        *("detach", "as_strided", "clone", "copy", "copy_", "_to_copy", "cat", "stack", "index"),
        *("index_select", "gather", "embedding", "arange", "ones", "zeros", "full", "empty"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros"),
        *("new_ones", "new_full", "empty_strided", "scalar_tensor", "lift_fresh", "where"),
        *("masked_fill", "masked_fill_", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_"),
        *("div", "div_", "neg", "pow", "rsqrt", "sqrt", "reciprocal", "exp", "expm1", "tanh"),
        *(
            "erf",
            "erf_",
            "log",
            "log1p",
            "sin",
            "cos",
            "abs",
            "clamp",
            "clamp_min",
            "clamp_max",
            "minimum",
        ),
        *("maximum", "relu", "square", "floor", "eq", "ne", "lt", "gt", "le", "ge", "logical_and"),
        *("logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "any", "all"),
        *("mean", "sum", "native_layer_norm", "_fused_rms_norm", "_softmax", "topk", "sort", "max"),
        *("amax", "scatter", "scatter_", "fill_", "zero_", "unfold", "repeat", "view_as_complex"),
        *("view_as_real", "polar", "complex", "real", "imag"),
    )
)
"""Operations over channels in which a row's bits do not depend on the other rows."""
_REPLACED = frozenset(("sigmoid", "silu", "gelu"))
"""Operations that `quire.worker.model.through.modules` replaces."""


class Refused(Exception):
    """An attention call needs something that Quire's cache or kernels do not support."""


@dataclass(slots=True)
class Found:
    """The result of a dry run."""

    attentions: list[Attention] = field(default_factory=list)
    """Attention layers in the order of their calls, which is the order of the cache's layers."""
    modules: list[str] = field(default_factory=list)
    """The names of the modules that make the calls, in the same order."""
    plan: Plan = field(default_factory=Plan)


def dry_run(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    max_model_len: int,
    is_deterministic: bool,
    on_gpu: bool = False,
) -> Found:
    """Runs the model in ``path``, described by ``spec``, on the device "meta".

    ``is_deterministic``: refuse operations in which a row's bits may depend on other rows.

    Raises:
        CheckpointError: transformers has no such model, or it cannot run on Quire; the message says
            why.
    """
    config = transformers_config(path, spec)
    name = config.architectures[0]
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _mask)
    found, recorder = Found(), _Recorder(max_model_len, is_encoder=spec.is_encoder)
    try:
        with torch.device("meta"):
            whole = (
                auto_class(spec)
                .from_config(config, dtype=dtype, attn_implementation=_NAME, **no_pooler(config))
                .eval()
            )
        _check_size(path, spec, whole)
        model = packed_part(whole, spec)
        if not spec.first_position and _counts_from_padding(model):
            raise Refused("its position ids start after that of the padding token")
        found.plan = install_for_dry_run(
            model, num_positions=max_model_len, dtype=dtype, is_strict=is_deterministic
        )
        out, ops = _run(model, recorder, has_head=spec.has_head)
        found.attentions = recorder.attentions()
    except CheckpointError:
        raise
    except Refused as error:
        raise CheckpointError(f"{path}: {name} cannot run: {error}") from error
    except NotALayer as error:
        raise CheckpointError(f"{path}: {name} cannot run: it computes {error}") from error
    except Exception as error:
        raise CheckpointError(f"{path}: {name} cannot run: {_reason(error)}") from error
    num_layers = config.get_text_config().num_hidden_layers
    called = list(recorder.calls)
    if len(called) != num_layers:
        raise CheckpointError(
            f"{path}: {name} cannot run: {len(called)} of its {num_layers} layers call "
            "transformers' attention interface, through which Quire attends"
        )
    expected = (_NUM_SAMPLES, spec.vocab_size) if spec.has_head else (_NUM_TOKENS, spec.hidden_size)
    if tuple(out.shape) != (1, *expected):
        raise CheckpointError(
            f"{path}: {name} cannot run: its result is {list(out.shape)} for {_NUM_SAMPLES} of "
            f"{_NUM_TOKENS} tokens, a vocabulary of {spec.vocab_size} and {spec.hidden_size} "
            "channels"
        )
    names = {module: each for each, module in model.named_modules()}
    found.modules = [names[module] for module in called]
    first = found.attentions[0]
    for number, attention in enumerate(found.attentions):
        for what in ("num_heads", "num_kv_heads", "key_size", "value_size"):
            if getattr(attention, what) != getattr(first, what):
                raise CheckpointError(
                    f"{path}: {name} cannot run: layer {number} has "
                    f"{what}={getattr(attention, what)}, layer 0 {getattr(first, what)}"
                )
    mixing = {op: where for op, where in ops.items() if op not in _ROWWISE | _REPLACED}
    if on_gpu and "mean" in ops:
        mixing["mean"] = ops["mean"]
    if is_deterministic and mixing:
        op, where = next(iter(mixing.items()))
        raise CheckpointError(
            f"{path}: {name} computes {op!r} in {where[0] or 'the model'}, whose bits may depend "
            "on the batch; deterministic=False (--no-deterministic) allows that"
        )
    if spec.untested:
        raise CheckpointError(f"{path}: {spec.untested}")
    found.plan.by_rows = sorted({where for op in _REPLACED & ops.keys() for where in ops[op]})
    return found


def _reason(error: Exception) -> str:
    """Why a dry run fails with ``error``, an exception of transformers' or torch's code."""
    said = str(error).splitlines()[0] if str(error) else ""
    if isinstance(error, KeyError) and _NAME in error.args:
        return (
            "its layers do not call transformers' attention interface, through which Quire attends"
        )
    if isinstance(error, TypeError | AttributeError) and _Mask.__name__ in said:
        return (
            "its layers attend by code of their own, for example with relative positions, and do "
            "not call transformers' attention interface, through which Quire attends"
        )
    if isinstance(error, AttributeError) and (part := replaced_part(error.obj)):
        return f"transformers' code for it reads {error.name!r} of {part}, which Quire replaces"
    if isinstance(error, RuntimeError) and "meta" in said:
        return f"transformers' code for it decides by values of tensors, before they exist: {said}"
    return f"a dry run of transformers' code raised {type(error).__name__}: {said}"


def _counts_from_padding(model: nn.Module) -> bool:
    """Whether a module computes position ids from the positions of padding tokens."""
    name = "create_position_ids_from_input_ids"
    return any(
        hasattr(module, name)
        or (hasattr(module, "padding_idx") and hasattr(sys.modules[type(module).__module__], name))
        for module in model.modules()
    )


def _check_size(path: Path, spec: ModelSpec, model: nn.Module) -> None:
    """Raises CheckpointError: the configuration describes a much larger model than the files hold.
    Memory for the model's sizes would be taken long before shapes are compared."""
    try:
        tensors = open_checkpoint(path).tensors.values()
    except CheckpointError:  # Raised again when the weights are read.
        return
    packed = 1 if spec.stored is None else 32 // spec.stored.least_bits
    in_files = packed * sum(math.prod(info.shape) for info in tensors)
    described = sum(each.numel() for each in model.parameters())
    if described > 2 * in_files:  # A tied head may count twice.
        raise CheckpointError(
            f"{path}: config.json describes {described} weights, but the files hold {in_files}: "
            "correct its sizes, or get all files of the model"
        )


def _run(
    model: Any, recorder: "_Recorder", *, has_head: bool
) -> tuple[Tensor, dict[str, list[str]]]:
    """The logits, or hidden states if there is no head; and for each operation, the names of the
    modules that call it directly."""
    for module in model.modules():
        module.quire_step = recorder
    ops = _Operations()
    meta = torch.device("meta")
    asked: dict[str, Any] = {}
    if has_head:
        asked["use_cache"] = False
        asked["logits_to_keep"] = torch.zeros(_NUM_SAMPLES, dtype=torch.long, device=meta)
    with torch.no_grad(), _watched(model, ops), ops:
        output = model(
            input_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=meta),
            position_ids=torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=meta),
            # Without it, transformers searches the positions for the ends of sequences.
            attention_mask=torch.ones(1, _NUM_TOKENS, dtype=torch.long, device=meta),
            **asked,
        )
    return (output.logits if has_head else output.last_hidden_state), ops.modules_of


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each operation with the innermost module that calls it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules_of: dict[str, list[str]] = {}
        self.stack = [""]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.split("::")[1]
        tensors = [each for each in args if isinstance(each, Tensor)]
        # An operation on parameters alone gives the same result in any batch.
        if len(tensors) != 1 or tensors[0].numel() > 1:
            self.modules_of.setdefault(name, []).append(self.stack[-1])
        return func(*args, **(kwargs or {}))


@contextmanager
def _watched(model: nn.Module, ops: _Operations) -> Iterator[None]:
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: ops.stack.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: (ops.stack.pop(), None)[1]))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, slots=True)
class _Mask:
    """A placeholder for a mask: the function of positions from which transformers builds it."""

    visible: Any


def _mask(*_: Any, mask_function: Any = None, **__: Any) -> _Mask:
    return _Mask(mask_function)


class _Recorder:
    """Records the calls of attention, by module."""

    def __init__(self, max_model_len: int, *, is_encoder: bool) -> None:
        self._max_model_len = max_model_len
        self._is_encoder = is_encoder
        self.calls: dict[nn.Module, Attention] = {}
        self._masks: dict[nn.Module, _Mask | None] = {}

    def attentions(self) -> list[Attention]:
        """The recorded layers, in the order of the calls. Their masks, if any, give the windows."""
        reaches: dict[int, tuple[int | None, int]] = {}
        found = []
        for module, attention in self.calls.items():
            mask = self._masks[module]
            if mask is not None:
                if id(mask) not in reaches:
                    reaches[id(mask)] = self._reach(mask, type(module).__name__)
                window, lookahead = reaches[id(mask)]
                attention = replace(attention, window=window, lookahead=lookahead)
            found.append(attention)
        return found

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: object,
        scaling: float | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        where = type(module).__name__
        if module in self.calls:
            raise Refused(f"{where} attends twice in a step")
        for name, value_of in others.items():
            if isinstance(value_of, Tensor | nn.Parameter) and name not in _HARMLESS:
                what = "attention sinks" if name in ("s_aux", "sinks") else name
                raise Refused(f"{where} has {what}, which our attention does not compute")
            if isinstance(value_of, float) and value_of and name != "dropout":
                raise Refused(
                    f"{where} has {name}={value_of}, which our attention does not compute"
                )
        is_causal = (
            getattr(module, "is_causal", True) is not False and others.get("is_causal") is not False
        )
        if not is_causal and not self._is_encoder:
            raise Refused(f"{where} is not causal")
        if getattr(module, "is_kv_shared_layer", False):
            raise Refused(f"{where} reads the KV of another layer")
        if mask is not None and not isinstance(mask, _Mask):
            raise Refused(f"{where} has a mask of its own, such as alibi's")
        if isinstance(scaling, Tensor) or query.dim() != 4 or len(query) != 1:
            raise Refused(f"{where} has a scale or heads of another kind")
        num_heads, size = query.shape[1], query.shape[3]
        num_kv_heads, value_size = key.shape[1], value.shape[3]
        if num_heads % num_kv_heads or key.shape[3] != size or value.shape[1] != num_kv_heads:
            raise Refused(
                f"{where} has Q {list(query.shape)}, K {list(key.shape)}, V {list(value.shape)}"
            )
        self._masks[module] = mask
        window = others.get("sliding_window")
        self.calls[module] = Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_size=size,
            value_size=value_size,
            scale=1 / math.sqrt(size) if scaling is None else float(scaling),
            rope=None,
            window=window,
            lookahead=0 if is_causal else self._max_model_len,
            score_cap=softcap,
        )
        out = query.new_empty(1, query.shape[2], num_heads, value_size)
        return out, None

    def _reach(self, mask: _Mask, where: str) -> tuple[int | None, int]:
        """The window that a mask's function amounts to (``None``: all tokens), and how many later
        tokens each token attends to."""
        length, kinds = self._max_model_len, "attention in chunks is not supported"
        batch, head = torch.zeros(2, dtype=torch.long)
        tokens_P = torch.arange(length)

        def visible(position: int) -> Tensor:
            try:
                seen = mask.visible(batch, head, torch.tensor(position), tokens_P)
            except RuntimeError as error:  # It depends on values of tensors.
                raise Refused(f"{where}'s mask is neither causal nor a window: {kinds}") from error
            return torch.as_tensor(seen).expand(length)

        window = int(visible(length - 1).sum())
        lookahead = int(visible(0).sum()) - 1
        if lookahead and not self._is_encoder:
            raise Refused(f"{where}'s mask is neither causal nor a window: {kinds}")
        near = {0, 1, 2, 3, window - 1, window, window + 1, 2 * window - 1, length // 2, length - 1}
        for position in sorted(place for place in near if 0 <= place < length):
            expected_P = tokens_P <= position + lookahead
            if window < length:
                expected_P &= tokens_P > position - window
            if not torch.equal(visible(position), expected_P):
                raise Refused(f"{where}'s mask is neither causal nor a window: {kinds}")
        return None if window == length else window, lookahead


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    recorder: _Recorder = module.quire_step
    return recorder.attend(module, query, key, value, attention_mask, **options)
