"""Limits of one model at one gateway."""

from dataclasses import dataclass, field

from quire.cluster.gateway.losses import CompletionConfig
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.worker.text.template.process import TemplateLimits


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """One model's limits at one gateway; ``admission`` has the limits of its waiting requests."""

    max_tokenizing_bytes: int = 2**20
    """Bytes of text that are tokenized at a time, each of which takes 150 to 200 bytes of memory.
    A text longer than half of this counts as half."""
    template: TemplateLimits = field(default_factory=TemplateLimits)
    """Limits on rendering one chat."""
    tool_call_parser: str = "auto"
    """The format in which the model writes tool calls, a name in `quire.cluster.dialects.formats`;
    "auto" derives it from the model's response template or chat template, "none" leaves calls as
    text. ``reasoning_parser`` is likewise the format of reasoning."""
    reasoning_parser: str = "auto"
    wakes_groups: bool = False
    """Requests are accepted even if no group runs, because groups are started for waiting
    requests."""
    completion: CompletionConfig = field(default_factory=CompletionConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
