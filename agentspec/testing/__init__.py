"""Tools for measuring and testing: forced-token replay on real vLLM, and a Redis server of one's own.

``replay``  recorded agent runs as end-to-end measurements: real engine, recorded tokens
"""
