"""Show a server's address without what may be secret in it."""


def without_secrets(address: str) -> str:
    """Return an address without user, password and query, for an error or a log."""
    # Cut up to the last @, so that a password with an unescaped / ? or @ is removed completely.
    before, found, after = address.rpartition("@")
    if found:
        scheme, slashes, _ = before.partition("//")
        address = (scheme + slashes if slashes else "") + "***@" + after
    shown, query, _ = address.partition("?")
    return shown + ("?…" if query else "")
