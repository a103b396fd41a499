"""Specify what the compiled core must answer, in plain Python written to be read.

Read in this order:

``index``               where a context occurred before
``scoring``             the candidates for one token and their probabilities
``drafting``            how a draft grows, and what is learned from verification
``arctic_suffix_rule``  ArcticInference's rule, to compare with
``session``             a session's turns: a tree in one text
``names``               the session, group and tenant of requests and turns
``corpus``              the responses that sessions share
``kept``                what a tenant, a session and a group hold of finished requests
``entries``             which tenants, sessions and groups are kept, and what is evicted
``request``             a running request
``cache``               the calls

tests/cache/test_fuzz.py compares the core's answers with these.
"""
