"""The way from the HTTP routes to the drafter: a method on every worker, called by ``collective_rpc``."""

from typing import Any

RPC_METHOD = "agentspec_rpc"


def worker_rpc(worker: Any, what: str, *args: Any) -> Any:
    """Answer of one worker to the HTTP routes: ``stats``, or ``request`` with an id. None where no trees live."""
    from agentspec.server_ext.vllm_adapter.drafter import AgentSpecProposer

    runner = getattr(worker, "model_runner", None)
    drafter = getattr(runner, "drafter", None)
    if not isinstance(drafter, AgentSpecProposer) or drafter.engine is None:
        return None
    if what == "request":
        return drafter.engine.request(str(args[0]))
    return drafter.engine.stats()


def add_worker_rpc() -> None:
    """Let ``collective_rpc`` reach ``worker_rpc``: a method on every worker."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, RPC_METHOD, worker_rpc)
