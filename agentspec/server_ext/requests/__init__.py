"""Bring an engine's requests from their beginning to their end.

``running``   the requests that have begun and not ended, and the lengths of their responses
``turnover``  those that wait for their start or end in the suffix cache: a step does a few of them
``cached``    starts them in the cache, keeps what they said, and sends it to the store
"""
