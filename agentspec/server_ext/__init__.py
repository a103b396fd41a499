"""Extend ``vllm serve`` with session-aware suffix drafts that vLLM verifies.

In the API server's process:

``api``           routes, what requests and responses carry, ``/metrics``
``identity``      who sent a request, and its tenant, session and group

In the engine's process, without vLLM and torch:

``engine``        DraftingEngine: one step from verified tokens to drafts. ``step`` is the data that it takes,
                  ``batch_lookup`` what is the same for all steps of a batch
``requests``      requests from their beginning to their end, in the engine and in the cache
``pricing``       measures steps, and says what the drafts of the next may cost
``fusion``        joins the suffix indexes and a draft model
``persistence``   turns to and from the store, and the snapshot
``figures``       what is counted
``session_admin`` sessions listed, exported, imported and erased
``public_corpus`` texts that all requests draft from that share anything

``settings``      the settings, from ``--additional-config`` and the environment, or (``arctic_methods``) from the
                  options of ArcticInference's methods
``speculator``    draft models, in torch alone
``vllm_adapter``  the one package that knows vLLM: its plugin and patches, its command line, its model runner -> Step
``vllm_launch``   ``engine_options``, for an offline ``LLM``
"""

UNFORCED = -1
"""Entry of a proposal at which a draft model takes its own token, for fusion and the speculators alike."""
