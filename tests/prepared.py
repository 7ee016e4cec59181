"""Builds requests in the form that groups and engines receive, `Prepared`, for tests."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams

_FIELDS = {field.name for field in fields(Prepared)}


def prepared(request_id: str, prompt: Sequence[int], **more: Any) -> Prepared:
    """A request. ``more`` sets fields of `Prepared` or `SamplingParams`; seed 0 by default."""
    token_ids = np.array(prompt, dtype=np.uint32)
    token_ids.flags.writeable = False  # The request keeps this array.
    own = {name: more.pop(name) for name in _FIELDS & more.keys()}
    return Prepared(
        **{"sampling": SamplingParams(**{"seed": 0, **more}), **own},
        request_id=request_id,
        prompt_token_ids=token_ids,
    )
