"""Show a server's address without what may be secret in it."""

import re


def without_secrets(address: str) -> str:
    """Return an address without user, password and query, for an error or a log."""
    return re.sub(r"^([\w+.-]*://)?.*@", r"\1***@", address.partition("?")[0], flags=re.DOTALL)
