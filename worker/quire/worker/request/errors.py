"""Errors of a worker that a caller may handle.

QuireError
├── InvalidRequest(ValueError)   this request cannot be served as it is; others are not affected
│   ├── ConstraintRefused        the constraint cannot be served with any request
│   └── ContextExceeded          prompt and output are longer than the context
├── UnknownArgument(TypeError)   a class has no argument of this name; the message says what to do
├── ConfigError(ValueError)      these settings cannot work; the message names value and remedy
├── CheckpointError(ValueError)  the model's files are missing, truncated or of an unsupported kind
├── AdapterError(ValueError)     an adapter's files are missing, damaged or of an unsupported kind
├── UnreadableTemplate(ValueError)  a response template uses something that Quire does not support
├── NoFreeBlocks                 the block pool has too few blocks; nothing was taken
├── BrokenLogits                 the request's logits were NaN or infinite; others continue
├── QueueFull                    the engine already holds as many requests as it may
└── RankFailure                  a tensor-parallel rank died or hangs; the whole group is lost
"""


class QuireError(Exception):
    """The root of every exception that Quire raises on purpose."""

    retry_after_s: float | None = None
    """Seconds after which a retry may succeed; ``None``: a retry would fail again."""


class InvalidRequest(QuireError, ValueError):
    """The request cannot be served as it is. Nothing was started."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """``param`` is the field that is wrong, such as ``top_p`` or ``tools[0].function``. The
        message names it too."""
        super().__init__(message)
        self.param = param

    def renamed(self, param: str) -> "InvalidRequest":
        """This error with the field called ``param``, the name that the client used."""
        message = str(self)
        if self.param is not None:
            message = message.replace(self.param, param, 1)
        return InvalidRequest(message, param=param)


class ConstraintRefused(InvalidRequest):
    """The request's constraint is invalid, not supported or too expensive, whatever the output."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="structured_outputs")


class ContextExceeded(InvalidRequest):
    """Prompt plus output is longer than the context. Nothing was started."""

    def __init__(self, message: str, *, param: str, max_model_len: int) -> None:
        super().__init__(message, param=param)
        self.max_model_len = max_model_len


class UnknownArgument(QuireError, TypeError):
    """A class has no argument of this name. For an argument of vLLM, the message says why."""


class ConfigError(QuireError, ValueError):
    """The configuration cannot work."""


class CheckpointError(QuireError, ValueError):
    """A checkpoint directory cannot be read as a model."""


class AdapterError(QuireError, ValueError):
    """An adapter cannot be read, or cannot be served with this model."""


class UnreadableTemplate(QuireError, ValueError):
    """A checkpoint's response template is malformed or not supported; the message says where."""


class BrokenLogits(QuireError):
    """The model's logits for the request were NaN or infinite. The request has ended; others are
    not affected. A retry on another group of the same model would give the same logits."""


class NoFreeBlocks(QuireError):
    """Fewer blocks are available than an allocation needs. Nothing was taken."""

    def __init__(self, *, needed: int, available: int) -> None:
        super().__init__(f"need {needed} blocks, {available} available")


class QueueFull(QuireError):
    """The engine already holds as many requests as its configuration allows."""

    retry_after_s: float | None = 1.0


class RankFailure(QuireError):
    """A tensor-parallel rank died, raised or missed its deadline. The group cannot continue."""
