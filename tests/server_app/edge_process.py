"""A real edge server as a child of the tests, and a certificate for it."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
TOKEN, ADMIN_TOKEN = "open sesame", "open, says the boss"
TOKENS = {"PACELINE_SPLIT_TOKEN": TOKEN, "PACELINE_SPLIT_ADMIN_TOKEN": ADMIN_TOKEN}
START_S, END_S = 90.0, 60.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "server_app.split_service", *arguments]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **TOKENS, **changes}


def run_to_its_end(*arguments: str, **changes: str) -> tuple[int, str]:
    """Exit code and standard error of an edge server that should not get as far as serving."""
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(**changes), capture_output=True, text=True, timeout=START_S
    )
    return done.returncode, done.stderr


class EdgeProcess:
    """`python -m server_app.split_service` on loopback, until `end` or `kill`."""

    def __init__(self, *arguments: str, port: int = 0, **changes: str) -> None:
        self._process = subprocess.Popen(
            command("--listen", "127.0.0.1", "--port", str(port), "--cores", "1", "--deterministic", *arguments),
            cwd=ROOT,
            env=environment(**changes),
            stdout=subprocess.PIPE,
        )
        try:
            self.address = self._ready()
        except BaseException:
            self.kill()
            raise
        self.port = int(self.address.rpartition(":")[2])

    def _ready(self) -> str:
        assert self._process.stdout is not None
        line, until_s = b"", time.monotonic() + START_S
        while not line.endswith(b"\n"):
            left_s = until_s - time.monotonic()
            assert left_s > 0, "the edge server does not say that it is ready"
            if select.select([self._process.stdout], [], [], left_s)[0]:
                read = os.read(self._process.stdout.fileno(), 1)
                assert read, f"the edge server ended with {self._process.wait(END_S)}"
                line += read
        found = re.fullmatch(r"split service on (127\.0\.0\.1:\d+)\n", line.decode())
        assert found, line
        return found.group(1)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        code = self._process.wait(END_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def end(self) -> int:
        """Ask it to stop; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """Ends it without a word, if it has not ended."""
        self._process.kill()
        self.wait()


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that vouches for itself, and of its key."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edge server")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(private, hashes.SHA256())
    )
    certificate, key = folder / "server.pem", folder / "server.key"
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return certificate, key
