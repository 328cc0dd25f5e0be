"""`tcsign`: a signature beside a plan, which `tcrun --trust` holds it to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tccompile import __version__
from tccompile.cli.command import EXISTING, NEW, VERSION, Command, check_output
from tccompile.errors import UsageError
from tccompile.terminal import say


@click.command(cls=Command)
@click.argument("plan", metavar="MODEL.plan", type=EXISTING)
@click.option("--key", type=EXISTING, required=True, metavar="PRIVATE.pem", help="The private key, of an elliptic curve.")
@click.option(
    "--certificate",
    "certificates",
    type=EXISTING,
    multiple=True,
    metavar="CERTIFICATE.pem",
    help="The key's certificate; repeat for those that lead from it to the one that is trusted.",
)
@click.option(
    "-o", "output", type=NEW, metavar="SIGNATURE", help="Where to write it; default, and where tcrun looks: MODEL.plan.sig."
)
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.version_option(__version__, message=VERSION)
def tcsign(plan: Path, key: Path, certificates: Sequence[Path], output: Path | None, quiet: bool) -> int:
    """Sign a plan with a key, as OpenSSF's model-signing does (pip install 'tccompile[sign]').

    A plan is a program: sign what you have built, or confirmed with tcinspect --rebuild. tcrun --trust PUBLIC.pem, or with the
    certificate that vouches for the key, then refuses plans that are not signed so.
    """
    from tccompile.plan.file import read_plan
    from tccompile.plan.trust import SUFFIX, sign

    output = output or plan.with_name(plan.name + SUFFIX)
    check_output(output, plan, key, *certificates)
    read_plan(plan)
    encrypted = b"ENCRYPTED" in key.read_bytes()
    if encrypted and certificates:
        raise UsageError(f"{key} has a passphrase, and with certificates none can be given: write the key without one first")
    passphrase = click.prompt(f"passphrase of {key}", hide_input=True, err=True) if encrypted else None
    sign(plan, output, key, passphrase, certificates)
    if not quiet:
        say(f"{output}: the signature of {plan} by {key}")
    return 0
