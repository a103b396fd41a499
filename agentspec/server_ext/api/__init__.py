"""Add to vLLM's API server: routes for sessions and figures, and what requests and responses carry.

``endpoints``         plugs the routes into vLLM's server; the engines' figures under ``/v1/agentspec``
``session_routes``    a caller's sessions, listed, exported, imported and erased
``path_ids``          ids at the end of a path
``imports``           the bodies of imports, and the threads that read them
``session_exports``   the bodies of imports and exports: turns as token ids
``session_texts``     texts and messages that a client gives for a session, as turns
``request_bodies``    reads two sources of drafts from a request's body:
``predictions``       OpenAI's Predicted Outputs, and
``quotes``            texts of the prompt that its response may quote in another spelling
``response_figures``  a request's figures in its response
``prometheus``        the engines' figures on vLLM's ``/metrics``

The engines are in other processes: ``vllm_adapter.frontend.engine_calls`` asks them.
"""
