"""Whose plans are run: those in a file of plans that somebody has confirmed, or those that a key has signed.

A plan's identity is the SHA-256 of its file's header, which has the SHA-256 of everything else in the file. So it takes no
reading of the weights, and whoever holds a plan to it notices any byte that is another one: of the header and the code when the
plan is read, of weights when they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from tccompile.errors import UsageError, VerificationError
from tccompile.plan.file import PREFIX, Plan, whole_file

FORMAT = "plans that are trusted by tccompile"
SUFFIX = ".sig"
"""What comes after a plan's name for its signature's."""

_PEM = b"-----BEGIN"
_CHUNK = 1 << 24


def check_trust(plan: Plan, path: str | os.PathLike[str], trust: str | os.PathLike[str]) -> None:
    """Hold a plan, read from `path`, to what a file says: see `Session`.

    trust  a file that `confirm` has written, or a public key or certificates in PEM, with which the plan must have been signed
    Raises VerificationError if the plan is not what it says, UsageError for a file that says nothing.
    """
    path, trust = Path(path), Path(trust)
    try:
        text = trust.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {trust}, which says what plans to trust: {error.strerror}") from None
    if _PEM in text:
        _check_signature(plan, path, trust, b"CERTIFICATE" in text)
    elif plan.identity not in _listed(trust, text):
        raise VerificationError(
            f"{path} is none of the plans that {trust} says to trust; where the compiler is installed, "
            f"tcinspect {path} --rebuild --trust {trust} adds it if its code is what the kernels make"
        )


# --- Plans that somebody has confirmed -------------------------------------------------------------------------------


def confirm(plan: Plan, trust: Path, how: str) -> None:
    """Add a plan to a file of plans to trust, or begin one. Raises UsageError for a file that is something else."""
    plans = _listed(trust, trust.read_bytes()) if trust.exists() else {}
    plans[plan.identity] = f"{plan.name}: {how}"
    with whole_file(trust) as file:
        file.write(json.dumps({"what": FORMAT, "plans": plans}, indent=2, sort_keys=True).encode() + b"\n")


def _listed(trust: Path, text: bytes) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    plans = said.get("plans") if isinstance(said, dict) and said.get("what") == FORMAT else None
    if not isinstance(plans, dict):
        raise UsageError(f"{trust} is neither a list of plans that tcinspect --rebuild --trust has written, nor a key in PEM")
    return plans


# --- Signatures ------------------------------------------------------------------------------------------------------


def sign(plan: Path, signature: Path, key: Path, passphrase: str | None, certificates: Iterable[Path] = ()) -> None:
    """Sign a plan's file, as OpenSSF's model-signing does.

    key           an elliptic curve's private key, in PEM
    certificates  of that key, and those that vouch for it; none to sign with the bare key
    Raises UsageError for a key or certificates that cannot be used.
    """
    config = _model_signing("signing").Config()
    first, *others = certificates or (None,)
    try:
        if first is None:
            config.use_elliptic_key_signer(private_key=key, password=passphrase.encode() if passphrase else None)
        else:
            config.use_certificate_signer(private_key=key, signing_certificate=first, certificate_chain=others)
        made = signature.with_name(f".{signature.name}.new")
        config.sign(plan, made)
        os.replace(made, signature)
    except Exception as error:  # whatever the libraries below raise of keys that they cannot use
        raise UsageError(f"{plan} cannot be signed with {key}: {_says(error)}") from error


def _check_signature(plan: Plan, path: Path, trust: Path, certificate: bool) -> None:
    """Hold the plan to its signature. What was hashed for that must be what the plan was read from, whatever has its name now."""
    hashing, verifying = _model_signing("hashing"), _model_signing("verifying")

    class Remembering(hashing.Config):  # type: ignore[name-defined, misc]
        """Keeps what was hashed."""

        def hash(self, *args: Any, **keywords: Any) -> Any:
            self.made = super().hash(*args, **keywords)
            return self.made

    signature = path.with_name(path.name + SUFFIX)
    if not signature.is_file():
        raise VerificationError(f"{path} is not signed, there is no {signature}: tcsign {path} --key PRIVATE.pem signs it")
    remembering, config = Remembering(), verifying.Config()
    if certificate:
        config.use_certificate_verifier(certificate_chain=[trust])
    else:
        try:
            config.use_elliptic_key_verifier(public_key=trust)
        except Exception as error:
            raise UsageError(f"{trust} is no public key of an elliptic curve: {_says(error)}") from error
    try:
        config.set_hashing_config(remembering).verify(path, signature)
    except Exception as error:
        raise VerificationError(
            f"{path}: {signature} is not the signature of this file by {trust} ({_says(error)}): do not run it"
        ) from error
    signed = [bytes(found.digest.digest_value) for found in remembering.made.resource_descriptors()]
    if signed != [_digest_of(path, plan.identity)]:
        raise VerificationError(f"{path}: another file has taken its name while it was read; do not run it")


def _digest_of(path: Path, identity: str) -> bytes | None:
    """The SHA-256 of a file that holds the plan of that identity; None if it holds something else."""
    whole = hashlib.sha256()
    with open(path, "rb") as file:
        prefix = file.read(PREFIX.size)
        whole.update(prefix)
        while data := file.read(_CHUNK):
            whole.update(data)
    return whole.digest() if len(prefix) == PREFIX.size and PREFIX.unpack(prefix)[-1].hex() == identity else None


def _model_signing(name: str) -> Any:
    """A module of OpenSSF's library."""
    try:
        return import_module(f"model_signing.{name}")
    except ModuleNotFoundError as error:
        raise UsageError(f"signatures need {error.name}, which is not installed: pip install 'tccompile[sign]'") from error


def _says(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
