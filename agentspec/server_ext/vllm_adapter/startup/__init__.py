"""Prepare an engine: what happens before vLLM makes one.

``launch``              turns ``agentspec serve`` into ``vllm serve``: checks and adds options, runs vLLM's command line
``command_line``        finds options among the arguments
``given_method``        reads the speculative method that an engine's options give
``speculative_config``  decides whether an engine drafts, by which method and with which options; says what drafts
``conflicts``           names options and models that exclude drafts, with the remedy
``native_methods``      configures vLLM's own methods, beside which agentspec drafts
``draft_limit``         chooses the longest draft by model, and finds how many draft tokens a step has room for
"""
