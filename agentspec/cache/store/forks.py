"""Let stores begin anew in a forked process, which must not use what it inherits.

SQLite keeps its locks on a file in the process's memory. A forked process inherits this memory, but not the locks. A
server's store numbers what it writes, so two processes that go on from one number would be taken for one.
"""

import os
import threading
from typing import Protocol
from weakref import WeakSet


class InheritedStore(Protocol):
    """Declare what a store does where its process forks."""

    def before_fork(self) -> None:
        """Wait until no thread is in the middle of a call, and let none begin."""

    def after_fork(self, *, in_child: bool) -> None:
        """Let calls begin again. in_child: this is the forked process."""


_stores: WeakSet[InheritedStore] = WeakSet()
_forking = threading.RLock()  # one fork at a time
_present: list[InheritedStore] = []  # the stores at the fork under way


def notify(store: InheritedStore) -> None:
    """Tell a store of each fork from now on, for as long as it lives."""
    _stores.add(store)


def _before() -> None:
    _forking.acquire()
    _present[:] = list(_stores)
    for store in _present:
        store.before_fork()


def _after(*, in_child: bool) -> None:
    try:
        for store in reversed(_present):
            store.after_fork(in_child=in_child)
    finally:
        _present.clear()
        _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=lambda: _after(in_child=False),
        after_in_child=lambda: _after(in_child=True),
    )
