"""The LoRA adapter that a user requests in the offline API."""

from dataclasses import dataclass

from quire.worker.request.arguments import explains_arguments
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.vllm_names import LORA


@explains_arguments(LORA)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for some of the prompts; fields and meanings are vLLM's.

    Two adapters with the same content are the same adapter, whatever their names.

    Raises:
        InvalidRequest: A field is empty or of a wrong type.
    """

    lora_name: str
    lora_int_id: int = 0
    """Accepted for vLLM's sake, and ignored."""
    lora_path: str = ""
    """A folder written by PEFT, or ``ORG/NAME[@REVISION]`` of the Hugging Face hub."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidRequest(
                    f"lora_request: {name}={value!r} must be a text that is not empty",
                    param="lora_request",
                )
