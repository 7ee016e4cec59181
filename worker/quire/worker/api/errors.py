"""Errors of a worker that a caller may handle.

QuireError
├── InvalidRequest(ValueError)   this request cannot be served as it is; others are unharmed
│   ├── ConstraintRefused        no request with its constraint is served
│   └── ContextExceeded          prompt and output are longer than the context
├── UnknownArgument(TypeError)   a class has no argument of this name; the message says what to do
├── ConfigError(ValueError)      these settings cannot work; the message names value and remedy
├── CheckpointError(ValueError)  the model's files are missing, truncated or of a foreign kind
├── AdapterError(ValueError)     an adapter's files are missing, damaged or of a kind not served
├── UnreadableTemplate(ValueError)  a response template says what Quire cannot express
├── NoFreeBlocks                 the block pool holds too few blocks; nothing was taken
├── BrokenLogits                 the model computed no numbers for this request; others go on
├── QueueFull                    the engine already holds as many requests as it may
└── RankFailure                  a tensor-parallel rank died or hangs; the whole group is lost
"""


class QuireError(Exception):
    """The root of every exception that Quire raises on purpose."""

    retry_after_s: float | None = None
    """After what time another attempt may succeed; ``None``: it would fail again."""


class InvalidRequest(QuireError, ValueError):
    """The request cannot be served as it is. Nothing was started."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """``param``: the field that it is about, such as ``top_p`` or ``tools[0].function``. The
        message names it too."""
        super().__init__(message)
        self.param = param

    def renamed(self, param: str) -> "InvalidRequest":
        """The same about the field that the client sent as ``param``."""
        message = str(self)
        if self.param is not None:
            message = message.replace(self.param, param, 1)
        return InvalidRequest(message, param=param)


class ConstraintRefused(InvalidRequest):
    """The request's constraint means nothing, is not supported or takes too much work, whatever
    the output."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="structured_outputs")


class ContextExceeded(InvalidRequest):
    """Prompt and output are longer together than the context. Nothing was started."""

    def __init__(self, message: str, *, param: str, max_model_len: int) -> None:
        super().__init__(message, param=param)
        self.max_model_len = max_model_len


class UnknownArgument(QuireError, TypeError):
    """A class has no argument of this name. The message says why, where it is one of vLLM's."""


class ConfigError(QuireError, ValueError):
    """The configuration cannot work."""


class CheckpointError(QuireError, ValueError):
    """A checkpoint directory cannot be read as a model."""


class AdapterError(QuireError, ValueError):
    """An adapter cannot be read, or cannot be served with this model."""


class UnreadableTemplate(QuireError, ValueError):
    """A checkpoint's response template is malformed, or cannot be expressed; the message says
    where."""


class BrokenLogits(QuireError):
    """The model's logits for the request were NaN or infinite. It has ended; others are unharmed,
    and another group of the same model would compute the same."""


class NoFreeBlocks(QuireError):
    """Fewer blocks are available than an allocation needs. Nothing was taken."""

    def __init__(self, *, needed: int, available: int) -> None:
        super().__init__(f"need {needed} blocks, {available} available")


class QueueFull(QuireError):
    """The engine already holds as many requests as its configuration allows."""

    retry_after_s: float | None = 1.0


class RankFailure(QuireError):
    """A tensor-parallel rank died, raised or missed its deadline. The group cannot go on."""
