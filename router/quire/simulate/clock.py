"""The time of a simulation, which everything in it reads and only its loop sets."""


class Clock:
    def __init__(self) -> None:
        self.now_ms = 0.0
