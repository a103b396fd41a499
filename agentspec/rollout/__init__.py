"""Sample answers to problems, epoch after epoch, each exactly once, with drafts from earlier samples.

    engine = OfflineEngine.start(MODEL, **rollout_options())
    generator = RolloutGenerator(engine, Journal(Path("rollouts.jsonl")))
    for epoch in generator.run(read_problems(Path("problems.jsonl")), Plan(samples=8, epochs=3)):
        print(epoch.tokens_per_step)

`agentspec rollout` does this on the command line; docs/rl.md says what it brings.
"""

from agentspec.problems import Problem, read_problems
from agentspec.rollout.generator import RolloutGenerator, rollout_options
from agentspec.rollout.journal import Journal
from agentspec.rollout.plan import EpochFigures, Plan
from agentspec.rollout.ray_engine import RayEngine
from agentspec.rollout.samples import Key, Sample
from agentspec.server_ext.vllm_adapter.offline import OfflineEngine

__all__ = [
    "EpochFigures",
    "Journal",
    "Key",
    "OfflineEngine",
    "Plan",
    "Problem",
    "RayEngine",
    "RolloutGenerator",
    "Sample",
    "read_problems",
    "rollout_options",
]
