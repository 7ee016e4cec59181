"""What happens to a prepared request at a gateway: `Pipeline` has the layers as one list.

Each layer is a callable that gets the request, ``take``, which consumes its chunks, and the layers
within. It may do something before and after those, run them again, or not at all. A layer that does
not look at chunks passes ``take`` on. For a client's request, which may have several completions:

    Meter         counts its tokens as they arrive, against the limits of its sender
    Admit         takes places for its completions, and waits in the queue until its turn has come
    MeetDeadline  aborts it when its deadline passes
    learn         remembers a constraint that a group refuses
    FanOut        runs its completions side by side, each through the layers of a completion

For one completion:

    Record        records how it ended, for metrics, logs and explanations
    Resume        tries again until it is finished, or a limit of losses is reached
    Isolate       lets it run alone if groups died in a row under it, and never if it is convicted
    Route         chooses a group for this try, or waits for one
    Send          sends it to the group, and makes chunks of the tokens that arrive

`Resume` has the only loop: one pass is a try. Within it each layer is one step, and leaves in the
`Completion` what the next try has to know.
"""

from quire.cluster.gateway.deadline import MeetDeadline
from quire.cluster.gateway.fan_out import FanOut
from quire.cluster.gateway.isolate import Isolate
from quire.cluster.gateway.record import Record
from quire.cluster.gateway.resume import Resume
from quire.cluster.gateway.route import Route
from quire.cluster.gateway.send import Send
from quire.cluster.gateway.work import Layer, Parts, Work, layered


class Pipeline:
    """The pipeline of one model. Its layers keep what its requests share."""

    def __init__(
        self, parts: Parts, *, meter: Layer[Work], admit: Layer[Work], learn: Layer[Work]
    ) -> None:
        completions = CompletionPipeline(parts)
        self.resume, self.isolate = completions.resume, completions.isolate
        self.run = layered(
            [meter, admit, MeetDeadline(parts.clock), learn],
            FanOut(parts, completions.run),
        )


class CompletionPipeline:
    """The part of a pipeline that runs one completion."""

    def __init__(self, parts: Parts) -> None:
        self.resume = Resume(parts)
        self.isolate = Isolate(parts)
        self.run = layered([Record(parts), self.resume, self.isolate, Route(parts)], Send(parts))
