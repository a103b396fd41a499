"""Extend ``vllm serve`` with session-aware suffix drafts that vLLM verifies.

``vllm_adapter``  the one package that knows vLLM: its plugin and patches, its command line, its model runner -> Step
``vllm_launch``   ``engine_options``, for an offline ``LLM``
``step``          plain data that passes between the adapter, the drafting engine and fusion
``engine``        DraftingEngine: one step from verified tokens to drafts; needs neither vLLM nor torch
``fusion``        joins the suffix indexes and a draft model
``pricing``       measures steps while serving, and says what the drafts of the next may cost
``persistence``   moves finished turns to the store and stored turns into the cache
``identity``      the tenant, session and group of a request
``settings``      the settings, from ``--additional-config`` and the environment
``metrics``       counters, per-request figures, the step-by-step record
``endpoints``     ``/v1/agentspec``: those figures over HTTP
``speculator``    draft models, in torch alone
"""

FREE = -1
"""Entry of a proposal at which a draft model takes its own token, for fusion and the speculators alike."""
