"""Tools for measuring and testing, for this project's tests and for users: forced-token replay, real servers.

``replay``        recorded agent runs as end-to-end measurements: real engine, recorded tokens
``replay_types``  what goes into a replay, and what it counts
``server``        a real model server, with or without the extension
``redis_server``  a real Redis server
"""
