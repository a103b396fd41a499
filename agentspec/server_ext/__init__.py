"""The extension of ``vllm serve``: session-aware suffix drafts, verified by vLLM.

``plugin``        vLLM's entry points (a general plugin, loaded in every process of vLLM)
``vllm_adapter``  what knows vLLM's internals: its hooks, engine state -> Step, drafts -> engine
``vllm_batch``    the part of it that reads a step out of the model runner
``vllm_launch``   ``agentspec serve`` -> ``vllm serve`` with the right options and environment
``proposer``      Step -> drafts; needs neither vLLM nor torch
``step_cost``     what verifying one more token costs, measured while serving
``persistence``   what a finished turn becomes in the store, and stored turns in the trees
``identity``      which tenant, session and group a request belongs to
``settings``      what can be set, from ``--additional-config`` and the environment
``metrics``       counters and per-request figures
``recorder``      the step-by-step record as JSON lines, written in the background
``endpoints``     ``/v1/agentspec``: those figures over HTTP
``speculator``    draft models, in torch alone
``token_counts``, ``special_tokens``  what a reduced head is chosen from
"""
