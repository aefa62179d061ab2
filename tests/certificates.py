"""Certificates of a test's own, by openssl."""

import subprocess
from pathlib import Path


def self_signed(folder: Path, name: str, host: str) -> tuple[Path, Path]:
    """Write name.crt and name.key, a certificate of `host` that is its own authority; raises CalledProcessError."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={host}"]
    command += ["-addext", f"subjectAltName=DNS:{host}", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
