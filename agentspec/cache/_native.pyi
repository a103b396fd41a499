from agentspec.cache import core
from agentspec.cache.policy import DraftPolicy

# A class, of which nothing is used but that calling it makes a core.
def Core(*, policy: DraftPolicy, limits: core.LimitNumbers, vocab_size: int) -> core.Core: ...

# Whether evicting looks at the clock, in the whole process: on, but where answers must not depend on a machine's speed.
def watch_clock(watched: bool) -> None: ...
