"""Measure and test against the real thing: forced-token replay on vLLM, a model server, a Redis server.

``replay``        replays recorded agent runs on a real engine and measures them
``replay_types``  holds the replay's input and its counts
``server``        starts a real model server, with or without the extension
``redis_server``  starts a real Redis server
"""
