"""Extend vLLM's API server.

``senders``          remembers who sends a request, and writes the identity into it
``engine_calls``     asks the engines
``response_lengths`` tells the engines how long responses are that stop texts may end
``chats``            a copy of the tokenizer, and messages as chat templates take them
``shutdown``         gives engines time to save when a server is stopped, by whichever signal, and answers its callers;
                     ends engines whose parent was killed
"""
