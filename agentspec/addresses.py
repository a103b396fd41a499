"""Show a server's address without secrets, tell whether only this machine can reach it, and bypass proxies for that."""

import ipaddress
from collections.abc import MutableMapping
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


def bypass_proxies(environment: MutableMapping[str, str]) -> None:
    """Let programs with this environment ask servers on this machine directly, and others as before.

    A proxy would look for 127.0.0.1 on its own machine.
    """
    kept = environment.get("no_proxy") or environment.get("NO_PROXY") or ""  # most programs prefer the first
    hosts = [host for host in kept.split(",") if host.strip()]
    if kept.strip() != "*":  # which means all hosts only where it stands alone
        hosts += [host for host in ("127.0.0.1", "localhost") if host not in hosts]
    environment["no_proxy"] = environment["NO_PROXY"] = ",".join(hosts)
