"""A rate limit for bytes that several threads read."""

import threading
import time


class Pace:
    """Limits reads to ``bytes_per_s`` for all threads together. Thread-safe."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def delay_s(self, num_bytes: int) -> float:
        """Seconds that the caller must wait before it reads ``num_bytes``."""
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(self._free_s, now_s)
            self._free_s = begin_s + num_bytes / self._bytes_per_s
            return begin_s - now_s
