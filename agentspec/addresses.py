"""Show a server's address without secrets, tell whether only this machine can reach it, and handle proxies."""

import ipaddress
import os
from collections.abc import MutableMapping
from urllib.parse import urlsplit

_PROXIES = ("all_proxy", "http_proxy", "https_proxy")


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


def proxy_refusal(error: Exception) -> str | None:
    """Return which proxies of the environment HTTPX cannot use, and what to do; None if they are not what it refused.

    error: what HTTPX raised when a client was made, which needs the ways to all proxies, also to those for other hosts.
    """
    named, remedy = list[str](), ""
    for name, address in sorted(os.environ.items()):
        wrong = _proxy_fault(address, isinstance(error, ImportError)) if name.lower() in _PROXIES and address else None
        if wrong is not None:
            named.append(f"{name}={without_secrets(address)}")
            remedy = wrong
    if not named:
        return None
    return f"{', '.join(named)}: a proxy that cannot be used; {remedy}, or unset the variable for this program"


def _proxy_fault(address: str, lacks_library: bool) -> str | None:
    """Return what to do about a proxy's address. lacks_library: HTTPX misses the library for SOCKS."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if lacks_library:
            return 'pip install "httpx[socks]"' if parts.scheme in ("socks5", "socks5h") else None
        if parts.scheme not in ("http", "https", "socks5", "socks5h"):
            return "write http://, https:// or socks5://"
        _ = parts.port
    except ValueError:
        return "its port is no number (special characters of a password are percent-encoded)"
    return None
