"""Show a server's address without secrets, and tell whether an address can be reached from this machine alone."""

import ipaddress
from urllib.parse import urlsplit


def without_secrets(address: str) -> str:
    """Return an address without user, password and query, for an error or a log."""
    # Cut up to the last @, so that a password with an unescaped / ? or @ is removed completely.
    before, found, after = address.rpartition("@")
    if found:
        scheme, slashes, _ = before.partition("//")
        address = (scheme + slashes if slashes else "") + "***@" + after
    shown, query, _ = address.partition("?")
    return shown + ("?…" if query else "")


def is_loopback(host: str | None) -> bool:
    """Return whether a server that is bound to this host can be reached from its own machine alone."""
    try:
        return host == "localhost" or (host is not None and ipaddress.ip_address(host).is_loopback)
    except ValueError:  # a name other than localhost may lead anywhere
        return False


def names_loopback(authority: str) -> bool:
    """Return whether the ``Host`` header of a request names the loopback interface. authority: its value."""
    try:
        return is_loopback(urlsplit(f"//{authority}").hostname)
    except ValueError:  # it is not an address
        return False
