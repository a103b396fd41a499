"""Keep background threads from holding up decode steps."""

import time

_HOLD_SECONDS, _SLEEP_SECONDS = 0.0002, 0.00005


class Courtesy:
    """Release the GIL now and then, so that a decode step need not wait for it.

    A step gets the GIL from a busy thread only after 5 ms, Python's switch interval, unless that thread sleeps. Use an
    object from one thread.
    """

    def __init__(self) -> None:
        self._since = time.thread_time()

    def pause(self) -> None:
        """Sleep for a moment if this thread has used .2 ms of CPU time since it last slept here."""
        if time.thread_time() - self._since >= _HOLD_SECONDS:
            time.sleep(_SLEEP_SECONDS)
            self._since = time.thread_time()
