"""Let stores begin anew in a forked process, which must not use what it inherits.

SQLite keeps its locks on a file in the process's memory. A forked process inherits this memory, but not the locks. A
server's store numbers what it writes, so two processes that go on from one number would be taken for one.
"""

import logging
import os
import threading
from typing import Any, Protocol
from weakref import WeakSet

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 5.0


class InheritedStore(Protocol):
    """Declare what a store does where its process forks."""

    def before_fork(self) -> None:
        """Wait until no thread is in the middle of a call, and let none begin."""

    def after_fork(self, *, in_child: bool) -> None:
        """Let calls begin again. in_child: this is the forked process."""


_stores: WeakSet[InheritedStore] = WeakSet()
_locks: list[Any] = []  # of modules, which are taken behind those of the stores
_forking = threading.RLock()  # one fork at a time
_present: list[InheritedStore] = []  # the stores at the fork under way
_taken: list[Any] = []  # those of the locks that are held during the fork under way


def notify(store: InheritedStore) -> None:
    """Tell a store of each fork from now on, for as long as it lives."""
    with _forking:
        _stores.add(store)


def hold(lock: Any) -> None:
    """Hold a module's lock (threading.RLock) during each fork from now on, so that it is free in the forked process."""
    _locks.append(lock)


def _before() -> None:
    _forking.acquire()
    _present[:] = list(_stores)
    for store in _present:
        store.before_fork()
    _taken.extend(lock for lock in _locks if lock.acquire(timeout=_LOCK_SECONDS))


def _after(*, in_child: bool) -> None:
    try:
        for lock in _locks:
            if lock in _taken:
                lock.release()
            elif in_child:  # a thread had it that this process lacks
                lock._at_fork_reinit()
        for store in _present:
            try:
                store.after_fork(in_child=in_child)
            except Exception:
                logger.exception("agentspec: a store cannot be used after a fork")
    finally:
        _present.clear()
        _taken.clear()
        _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before,
        after_in_parent=lambda: _after(in_child=False),
        after_in_child=lambda: _after(in_child=True),
    )
