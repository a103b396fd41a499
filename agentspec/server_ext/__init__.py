"""The extension of ``vllm serve``: session-aware suffix drafts, verified by vLLM.

``vllm_adapter``  the one package that knows vLLM: its plugin and patches, its command line, its model runner -> Step
``vllm_launch``   ``engine_options``, for an offline ``LLM``
``step``          plain data that passes between the adapter, the drafting engine and fusion
``engine``        DraftingEngine: one step from verified tokens to drafts; needs neither vLLM nor torch
``fusion``        the suffix indexes and a draft model together
``step_cost``     what verifying one more token costs, measured while serving
``persistence``   finished turns to the store, stored turns to the cache
``identity``      which tenant, session and group a request belongs to
``settings``      what can be set, from ``--additional-config`` and the environment
``metrics``       counters, per-request figures, the step-by-step record
``endpoints``     ``/v1/agentspec``: those figures over HTTP
``speculator``    draft models, in torch alone
"""
