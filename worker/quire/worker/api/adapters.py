"""An adapter as a user names it."""

from dataclasses import dataclass

from quire.worker.api.arguments import explains_arguments
from quire.worker.api.errors import InvalidRequest
from quire.worker.api.vllm_names import LORA


@explains_arguments(LORA)
@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for some of the prompts; fields and meanings are vLLM's.

    Two of the same content are the same adapter, whatever they are called.

    Raises:
        InvalidRequest: A field is empty or of a wrong type.
    """

    lora_name: str
    lora_int_id: int = 0
    """A number of the user's, which means nothing here."""
    lora_path: str = ""
    """A folder that PEFT has written, or ``ORG/NAME[@REVISION]`` of the Hugging Face hub."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidRequest(
                    f"lora_request: {name}={value!r} must be a text that is not empty",
                    param="lora_request",
                )
