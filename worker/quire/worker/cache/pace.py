"""How fast bytes may be read, by any number of threads together."""

import threading
import time


class Pace:
    """Safe for threads."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def delay_s(self, num_bytes: int) -> float:
        """How long to wait before so many bytes are read."""
        with self._lock:
            now_s = time.monotonic()
            begin_s = max(self._free_s, now_s)
            self._free_s = begin_s + num_bytes / self._bytes_per_s
            return begin_s - now_s
