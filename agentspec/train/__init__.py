"""Train speculators: ``agentspec train CONFIG.yaml``.

``config``         the YAML file
``corpus``         conversations from recorded calls, the store, or prompts that vLLM answers (``generate``)
``conversations``  how the calls of a session become a conversation
``hidden_states``  the target's hidden states, cached in shards
``trainer``        batches, losses and the loop
``evaluate``       acceptance per position on held-out sessions
``run``            a whole run, from data to report
``files``          errors of reading and writing that name the file and the remedy
"""
