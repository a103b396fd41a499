"""Keep background threads from holding up decode steps."""

import time

_HOLD_SECONDS, _SLEEP_SECONDS = 0.0002, 0.00005


class Courtesy:
    """Give the interpreter to other threads now and then.

    A decode step that waits for a background thread to let go of the interpreter waits for 5 ms, Python's switch
    interval, unless that thread sleeps. Use an object from one thread.
    """

    def __init__(self) -> None:
        self._since = time.thread_time()

    def pause(self) -> None:
        """Sleep for a moment if this thread has worked for a fifth of a millisecond since the last time."""
        if time.thread_time() - self._since >= _HOLD_SECONDS:
            time.sleep(_SLEEP_SECONDS)
            self._since = time.thread_time()
