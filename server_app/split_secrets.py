"""Tokens and TLS files of a split service: tokens from the environment only, PEM files by path."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

TOKEN_VARIABLE, ADMIN_TOKEN_VARIABLE = "PACELINE_SPLIT_TOKEN", "PACELINE_SPLIT_ADMIN_TOKEN"


def tokens() -> tuple[str, str]:
    """The tokens of an edge server: that of sessions, which clients are told, and that of admin calls.

    Raises:
        ValueError: one is missing, or both are the same; the text never holds them.
    """
    token, admin_token = _token_from(TOKEN_VARIABLE), _token_from(ADMIN_TOKEN_VARIABLE)
    if token == admin_token:
        raise ValueError(
            f"{TOKEN_VARIABLE} and {ADMIN_TOKEN_VARIABLE} must differ: every client is told the first of them"
        )
    return token, admin_token


def read_pem(path: str) -> bytes | None:
    """What the file at `path` holds; None for an empty path.

    Raises:
        ValueError: it cannot be read.
    """
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def check_pair(certificate: str, private_key: str) -> None:
    """Both files are PEM and belong together: gRPC itself would only say so when a client connects.

    Raises:
        ValueError: they cannot be read, or used.
    """
    for path in (certificate, private_key):
        read_pem(path)
    try:
        # Without a password of ours, a key that is encrypted would make OpenSSL ask on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key, password=lambda: b"")
    except (ssl.SSLError, OSError) as error:
        raise ValueError(f"{certificate} and {private_key} are no certificate and its key: {error}") from None


def _token_from(variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"the environment variable {variable} must hold a token of the split service")
    return token
