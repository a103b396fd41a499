"""Name what clients and servers with the extension agree on: paths, headers, fields, and limits of requests."""

ROUTE = "agentspec"
"""Last part of the path below which the extension's routes lie, beside vLLM's: ``/v1/agentspec/…``."""
FIGURES = "agentspec"
"""Field of a response, or of a stream's last chunk, that has the extension's figures."""
FIGURES_HEADER = "X-Agentspec-Figures"
"""Header that asks for figures in the response: summary, or detailed, with the sources of the tokens."""
SALT_HEADER = "X-Cache-Salt"
"""Header that gives a session's cache salt to the routes of sessions."""
SESSION_HEADER, PARENT_HEADER = "X-Session-ID", "X-Parent-Session-ID"
"""Headers that name a request's session, and the session that started it. The first is vLLM's own."""

MAX_IMPORT_BYTES = 8 << 20
"""Longest body of an import, in bytes: about a million tokens. Parsed, it may take 25 times as much memory."""
MAX_IMPORT_TURNS = 1 << 15
"""Most turns, texts or messages in a body. However short, each takes 1.5 KB while it is read, and a thread's time."""
IMPORT_PART_BYTES = MAX_IMPORT_BYTES // 2
"""About the most bytes of turns or texts that a client puts into one body, which says more about each of them."""
MAX_PREDICTION = 16_384
"""Most tokens of a prediction."""
