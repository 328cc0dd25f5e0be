"""Signatures beside plans: `tcsign`, and `tcrun --trust KEY`, with real keys and certificates."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tccompile.cli import commands, sign
from tccompile.errors import VerificationError
from tccompile.plan.file import write_plan
from tccompile.runtime.session import Session
from tests.commands import Run
from tests.small import feeds, plan

pytest.importorskip("model_signing")
pytest.importorskip("OpenSSL")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PEM = serialization.Encoding.PEM
USES = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign")
USES = (*USES, "crl_sign", "encipher_only", "decipher_only")


def _private(key, passphrase: bytes | None = None) -> bytes:
    how = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, how)


def _public(key) -> bytes:
    return key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _certificate(name: str, key, issuer: x509.Certificate | None, by, days: int = 30) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    used = "key_cert_sign" if issuer is None else "digital_signature"
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer.subject if issuer else subject)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(60)).not_valid_after(now + datetime.timedelta(days))
    builder = builder.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), True)
    builder = builder.add_extension(x509.KeyUsage(**{use: use == used for use in USES}), True)
    if issuer is not None:
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), False)
    return builder.sign(by, hashes.SHA256())


@pytest.fixture(scope="module")
def keys() -> dict[str, bytes]:
    mine, other, root, leaf = (ec.generate_private_key(ec.SECP256R1()) for _ in range(4))
    trusted, vouched = (c := _certificate("root", root, None, root)), _certificate("builder", leaf, c, root)
    foreign = _certificate("another root", other, None, other)
    return {
        "mine.key": _private(mine), "mine.pem": _public(mine), "other.key": _private(other), "other.pem": _public(other),
        "leaf.key": _private(leaf), "leaf.crt": vouched.public_bytes(PEM), "root.crt": trusted.public_bytes(PEM),
        "old.crt": _certificate("old", leaf, c, root, days=-1).public_bytes(PEM), "foreign.crt": foreign.public_bytes(PEM),
        "rsa.key": _private(rsa.generate_private_key(65537, 2048)), "locked.key": _private(mine, b"secret"),
    }  # fmt: skip


SIGN = "tcsign m.plan --key mine.key"
RUN = "tcrun m.plan x.npz --device cpu --trust"
CHAIN = "tcsign m.plan --key leaf.key --certificate leaf.crt --certificate root.crt"

CASES: dict[str, tuple[list[str], int, str]] = {
    "signed": ([SIGN, f"{RUN} mine.pem"], 0, ""),
    "not signed": ([f"{RUN} mine.pem"], 9, "m.plan is not signed, there is no m.plan.sig: tcsign m.plan --key PRIVATE.pem"),
    "by another key": ([SIGN, f"{RUN} other.pem"], 9, "m.plan.sig is not the signature of this file by other.pem"),
    "another plan's": ([SIGN, "change", f"{RUN} mine.pem"], 9, "m.plan.sig is not the signature of this file by mine.pem"),
    "a byte of weights": ([SIGN, "flip", f"{RUN} mine.pem"], 9, "m.plan.sig is not the signature of this file by mine.pem"),
    "a byte of what is read at once": ([SIGN, "flip end", f"{RUN} mine.pem"], 5, "its SHA-256 is not what the header says"),
    "no signature at all": ([SIGN, "garble", f"{RUN} mine.pem"], 9, "m.plan.sig is not the signature"),
    "signed again": ([SIGN, "change", SIGN, f"{RUN} mine.pem"], 0, ""),
    "by a certified key": ([CHAIN, f"{RUN} root.crt"], 0, ""),
    "certified by others": ([CHAIN, f"{RUN} foreign.crt"], 9, "m.plan.sig is not the signature of this file by foreign.crt"),
    "a certificate that has expired since": (
        ["tcsign m.plan --key leaf.key --certificate old.crt --certificate root.crt", f"{RUN} root.crt"],
        0,
        "",
    ),
    "a bare key where certificates are asked for": ([SIGN, f"{RUN} root.crt"], 9, "m.plan.sig is not the signature"),
    "a certificate of another key": (
        ["tcsign m.plan --key other.key --certificate leaf.crt"], 2, "m.plan cannot be signed with other.key",
    ),
    "a private key to trust": ([SIGN, f"{RUN} mine.key"], 2, "mine.key is no public key"),
    "no elliptic curve": (["tcsign m.plan --key rsa.key"], 2, "m.plan cannot be signed with rsa.key"),
    "a locked key and certificates": (["tcsign m.plan --key locked.key --certificate leaf.crt"], 2, "has a passphrase"),
    "a damaged plan is not signed": (["cut", SIGN], 5, "m.plan"),
    "the signature is the plan": (["tcsign m.plan --key mine.key -o m.plan"], 2, "choose another name"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_good_cases_and_bad_ones(
    case: str, run: Run, tmp_path: Path, keys: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, code, says = CASES[case]
    monkeypatch.setattr(commands, "tcsign", sign.tcsign, raising=False)
    for name, text in keys.items():
        (tmp_path / name).write_bytes(text)
    np.savez(tmp_path / "x.npz", **feeds())
    path, signature = tmp_path / "m.plan", tmp_path / "m.plan.sig"
    write_plan(plan(), path)

    def flipped(what: Any) -> bytes:
        """The file with a bit of these bytes changed."""
        at = (data := path.read_bytes()).rindex(bytes(what)[:40])
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    changes: dict[str, Callable[[], object]] = {
        "change": lambda: write_plan(replace(plan(), name="other"), path),
        "flip": lambda: path.write_bytes(flipped(plan().weights["w2"])),
        "flip end": lambda: path.write_bytes(flipped(path.read_bytes()[-40:])),
        "garble": lambda: signature.write_text("{}"),
        "cut": lambda: path.write_bytes(path.read_bytes()[:-9]),
    }
    for line in lines[:-1]:
        if line in changes:
            changes[line]()
        else:
            assert run(*line.split()).code == 0, line
    result = run(*lines[-1].split())
    assert result.code == code, result.err
    assert says in result.err


def test_a_key_with_a_passphrase(tmp_path: Path, keys: dict[str, bytes]) -> None:
    from tccompile.plan.trust import sign as signed

    write_plan(plan(), tmp_path / "m.plan")
    for name in ("locked.key", "mine.pem"):
        (tmp_path / name).write_bytes(keys[name])
    signed(tmp_path / "m.plan", tmp_path / "m.plan.sig", tmp_path / "locked.key", "secret")
    Session(tmp_path / "m.plan", "cpu", trust=tmp_path / "mine.pem").close()


def test_a_file_that_takes_the_plan_s_name(tmp_path: Path, keys: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan that was read is the one that must be signed, not what has its name when the signature is checked."""
    from tccompile.plan import trust
    from tccompile.plan.file import read_plan

    path = tmp_path / "m.plan"
    for name in ("mine.key", "mine.pem"):
        (tmp_path / name).write_bytes(keys[name])
    write_plan(replace(plan(), name="evil"), path)
    read = read_plan(path)
    write_plan(plan(), path)
    trust.sign(path, tmp_path / "m.plan.sig", tmp_path / "mine.key", None)
    with pytest.raises(VerificationError, match="another file has taken its name"):
        trust.check_trust(read, path, tmp_path / "mine.pem")


def test_the_signature_is_one_that_others_verify(tmp_path: Path, keys: dict[str, bytes]) -> None:
    from model_signing import verifying

    from tccompile.plan import trust

    write_plan(plan(), tmp_path / "m.plan")
    for name in ("mine.key", "mine.pem"):
        (tmp_path / name).write_bytes(keys[name])
    trust.sign(tmp_path / "m.plan", tmp_path / "m.plan.sig", tmp_path / "mine.key", None)
    verifying.Config().use_elliptic_key_verifier(public_key=tmp_path / "mine.pem").verify(
        tmp_path / "m.plan", tmp_path / "m.plan.sig"
    )
