"""Explain what is wrong with a TLS connection to Redis, in terms of the store URL's options."""

import re
import ssl
from collections.abc import Mapping
from pathlib import Path

_VERIFY = re.compile(r"certificate verify failed: ([^(\n]*\w)")
_UNKNOWN_AUTHORITY = re.compile(r"self.signed certificate|issuer certificate")
_WRONG_TIME = re.compile(r"expired|not yet valid")
_NO_HANDSHAKE = re.compile(r"timeout connecting|wrong.version.number|record.layer.failure", re.IGNORECASE)
_ENDED = re.compile(r"reset by peer|closed by server", re.IGNORECASE)
_NO_CERTIFICATE = re.compile(r"certificate required|EOF occurred in violation of protocol|handshake failure")


def explain_tls(error: str, options: Mapping[str, str]) -> str | None:
    """Return why a connection failed, and the remedy; None if the cause does not seem to be TLS.

    error: redis-py's text, which names no file. options: those of the URL that begin with ``ssl_``.
    """
    if fault := _unreadable(options):
        return fault
    if found := _VERIFY.search(error):
        if _UNKNOWN_AUTHORITY.search(found[1]):
            remedy = "name a PEM file with the certificate of its authority in the URL's option ssl_ca_certs"
        elif _WRONG_TIME.search(found[1]):
            remedy = "give the server a certificate that is valid now, or set this machine's clock"
        else:
            remedy = "give the server another certificate, or write the name that this one is for into the URL"
        return f"the server's certificate is refused ({found[1]}); {remedy}"
    if _NO_CERTIFICATE.search(error) and "ssl_certfile" not in options:
        return (
            "the server ended the TLS handshake; if it asks for a certificate, name one with the URL's options"
            " ssl_certfile and ssl_keyfile"
        )
    return None


def scheme_remedy(error: str, tls: bool) -> str:
    """Return the remedy to add to an error if only one side may use TLS, otherwise "". tls: whether the client does."""
    if tls and _NO_HANDSHAKE.search(error):
        return "; if the server has no TLS, write redis in place of rediss"
    if not tls and _ENDED.search(error):
        return "; if the server wants TLS, write rediss in place of redis"
    return ""


def _unreadable(options: Mapping[str, str]) -> str | None:
    """Return which file of the options cannot be used, and why; None if all can."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority, certificate = options.get("ssl_ca_certs"), options.get("ssl_certfile")
    if authority is not None:
        try:
            context.load_verify_locations(authority)
        except OSError as error:  # ssl.SSLError is one
            return f"ssl_ca_certs={authority} holds no certificates that can be read ({error}); name a PEM file there"
    if certificate is not None:
        key = options.get("ssl_keyfile")
        try:
            for file in filter(None, (certificate, key)):
                Path(file).open("rb").close()  # its error says which file, and the one below does not
            context.load_cert_chain(certificate, key, password="")  # or OpenSSL would ask the terminal for it
        except OSError as error:
            named = f"ssl_certfile={certificate}" + ("" if key is None else f" and ssl_keyfile={key}")
            return f"{named} cannot be used ({error}); name PEM files with a certificate and its key, not encrypted"
    return None
