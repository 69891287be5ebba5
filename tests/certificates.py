"""A certificate of loopback's names that signs itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "server", *options: str) -> tuple[Path, Path]:
    """Its file and its key's. options: of `openssl req`, in place of `-nodes` (a key without a pass phrase)."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2")
    names = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1")
    files = ("-keyout", str(key), "-out", str(cert))
    subprocess.run(("openssl", "req", *kind, *names, *files, *(options or ("-nodes",))), check=True, capture_output=True)
    return cert, key
