"""The table of multiply instructions: what each generation has, and that no other place in the project has their text."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

from tccompile.arch import ARCHS
from tccompile.emit.toolchain import ptxas
from tccompile.kernels.ptx.atoms import ATOMS, ROW_OF, Atom, atoms, of_warpgroups, thread_atom, warp_atom

ROOT = Path(__file__).parents[2]


BEST: dict[str, list[str]] = {"sm_61": [], "sm_70": ["mma.m8n8k4"], "sm_75": ["mma.m16n8k8"], "sm_90a": ["wgmma"]}
"""The largest product of generations that have another one than Ampere."""


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
def test_a_generation_s_best_is_what_its_row_says(arch) -> None:
    names = [atom.name for atom in atoms(arch)]
    assert names[:1] == BEST.get(arch.name, ["mma.m16n8k16"])
    assert bool(names) == (arch.tensor_tflops > 0)
    assert all(ATOMS[name].since <= arch.cc for name in names)
    assert ("wgmma" in names) == (arch.suffix == "a")
    found, whole = warp_atom(arch, quads=True), warp_atom(arch)
    assert of_warpgroups(arch) == (arch.name == "sm_90a")
    assert [found and found.name] == (["mma.m16n8k16"] if of_warpgroups(arch) else names[:1] or [None])
    assert whole == (None if names[:1] == ["mma.m8n8k4"] else found)
    assert {x.k for x in atoms(arch, sparse=True)} == ({16, 32} if arch.cc >= (8, 0) else set())
    assert atoms(arch, "f32", "f32") == []
    for kind, k in (("bf16", 16), ("tf32", 8)):
        found, wide = warp_atom(arch, kind, kind), [x for x in atoms(arch, kind, kind) if x.warpgroup]
        assert (found and (found.k, found.acc)) == ((k, "f32") if arch.cc >= (8, 0) else None)
        assert [x.k for x in wide] == ([k] if arch.suffix == "a" else [])


@pytest.mark.parametrize(
    ("name", "words", "text"),
    [  # PTX ISA, "Matrix fragments": registers of a, of b and of the accumulators
        ("mma.m8n8k4", (2, 2, 8), "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"),
        ("mma.m16n8k8", (2, 1, 4), "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"),
        ("mma.m16n8k16", (4, 2, 4), "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
        ("mma.m16n8k16.bf16", (4, 2, 4), "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
        ("mma.m16n8k8.tf32", (4, 2, 4), "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"),
        ("mma.sp.m16n8k16", (2, 2, 4), "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"),
        ("mma.sp.m16n8k32", (4, 4, 4), "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"),
        ("mma.m8n8k16.s8", (1, 1, 2), "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32"),
        ("mma.m16n8k32.s8", (4, 2, 4), "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"),
        ("mma.m16n8k32.e4m3", (4, 2, 4), "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"),
        ("fma", (1, 1, 1), "fma.rn.f32"),
        ("dp4a", (1, 1, 1), "dp4a.s32.s32"),
        ("mma.sp.m16n8k64.s8", (4, 4, 4), "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32"),
        ("mma.sp.m16n8k64.e4m3", (4, 4, 4), "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.f32.e4m3.e4m3.f32"),
    ],
)
def test_parts_of_a_lane(name: str, words: tuple[int, int, int], text: str) -> None:
    atom = ATOMS[name]
    assert (atom.words_a, atom.words_b, atom.words_acc) == words and atom.text() == text


def test_a_warpgroup_s_takes_any_eights() -> None:
    atom = ATOMS["wgmma"]
    assert atom.text(24) == "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16" and atom.words_a == 4
    assert ATOMS["wgmma.sp.s8"].text(8, b="u8") == "wgmma.mma_async.sp.sync.aligned.m64n8k64.s32.s8.u8"
    assert ATOMS["wgmma.bf16"].text(8) == "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    assert (
        ATOMS["wgmma.tf32"].text(256) == "wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32"
        and ATOMS["wgmma.tf32"].words_a == 4
    )
    for n in (0, 12, 264):
        with pytest.raises(AssertionError, match="has no n of"):
            atom.text(n)
    with pytest.raises(AssertionError, match="has no n of"):
        ATOMS["mma.m16n8k8"].text(16)


@pytest.mark.parametrize(("kinds", "since"), [(("s8", "u8"), (7, 5)), (("e4m3", "e5m2"), (8, 9))])
def test_eight_bits_mix(kinds: tuple[str, str], since: tuple[int, int]) -> None:
    for arch, a, b in product(ARCHS.values(), kinds, kinds):
        found = atoms(arch, a, b)
        assert bool(found) == (arch.cc >= since)
        assert any(x.warpgroup for x in found) == (arch.name == "sm_90a")
        assert all(f".{a}.{b}" in x.text(a=a, b=b) for x in found)
    for arch, a, b in product(ARCHS.values(), kinds, kinds):
        found = thread_atom(arch, a, b)
        assert (found and found.name) == ("dp4a" if "s8" in kinds else None)  # every generation that code is made for has it
        signs = [".u32" if kind == "u8" else ".s32" for kind in (a, b)]
        assert found is None or found.text(a=a, b=b) == "dp4a" + "".join(signs)
    with pytest.raises(AssertionError, match="does not multiply s8 by e4m3"):
        ATOMS["wgmma.s8"].text(b="e4m3")


def test_cuda_cores_multiply_float32_and_bytes() -> None:
    for arch in ARCHS.values():
        assert thread_atom(arch, "f32", "f32") is ATOMS["fma"]
        assert [thread_atom(arch, kind, kind) for kind in ("f16", "bf16", "tf32", "e4m3")] == [None] * 4
        assert thread_atom(arch, "s8", "f32") is None


def test_columns_of_a_warpgroup_s_integers() -> None:
    eights, sixteens = range(8, 257, 8), [8, 16, 24, *range(32, 257, 16)]
    assert [n for n in range(300) if ATOMS["wgmma.s8"].takes(n)] == sixteens
    assert [n for n in range(300) if ATOMS["wgmma.e4m3"].takes(n)] == list(eights)
    across = {x.name for x in ATOMS.values() if x.warpgroup and not x.along_k}
    assert across == {"wgmma", "wgmma.bf16", "wgmma.sp", "wgmma.sp.bf16"}


def statement(atom: Atom, a: str, b: str) -> str:
    """One instruction between registers of its own, in PTX."""

    def names(letter: str, words: int) -> str:
        return f"{{{', '.join(f'{letter}{i}' for i in range(words))}}}"

    sums = f".reg .{atom.acc} d<{atom.words_acc}>;"
    if atom.warpgroup:
        signs = {"s32": ""}.get(atom.acc, ", 1, 1") + ("" if atom.along_k else ", 0, 0")
        places = ", e, 0" if atom.sparse else ""
        return f"{{ {sums} {atom.text(a=a, b=b)} {names('d', atom.words_acc)}, x, y{places}, p{signs}; }}"
    parts = f".reg .b32 a<{atom.words_a}>, b<{atom.words_b}>;"
    if atom.threads == 1:
        return f"{{ {sums} {parts.replace('.b32', '.f32') if atom.a == 'f32' else parts} {atom.text(a=a, b=b)} d0, a0, b0, d0; }}"
    operands = [names(*part) for part in (("d", atom.words_acc), ("a", atom.words_a), ("b", atom.words_b), ("d", atom.words_acc))]
    return f"{{ {sums} {parts} {atom.text(a=a, b=b)} {', '.join(operands)}{', e, 0' if atom.sparse else ''}; }}"


@pytest.mark.parametrize(
    "arch", [ARCHS[name] for name in ("sm_61", "sm_70", "sm_75", "sm_80", "sm_89", "sm_90a")], ids=lambda a: a.name
)
def test_the_first_generation_s_assembler_takes_each(arch, tmp_path: Path) -> None:
    lines = [statement(x, a, b) for x in ATOMS.values() if arch is next(other for other in ARCHS.values() if other.cc >= x.since)
             for a, b in product(*([k, *(o for o, row in ROW_OF.items() if row == k)] for k in (x.a, x.b)))]  # fmt: skip
    registers = ".reg .b64 x, y; .reg .pred p; .reg .b32 e;"
    body = f"{registers} setp.eq.u32 p, 0, 0; mov.b64 x, 0; mov.b64 y, 0; mov.b32 e, 0;\n" + "\n".join(lines)
    source = tmp_path / "atoms.ptx"
    source.write_text(f".version 8.7\n.target {arch.name}\n.address_size 64\n.visible .entry f() {{\n{body}\nret; }}\n")
    done = subprocess.run([ptxas(), f"-arch={arch.name}", source, "-o", tmp_path / "atoms.cubin"], capture_output=True, text=True)
    assert lines and done.returncode == 0, done.stdout + done.stderr


def test_no_other_place_has_their_text() -> None:
    text = re.compile(r"mma(\.sp)?(::ordered_metadata)?\.sync\.aligned|wgmma\.mma_async|dp4a\.[su]32")
    found = [p.relative_to(ROOT) for folder in ("kernels", "tccompile") for p in (ROOT / folder).rglob("*.py")
             if p.resolve().is_relative_to(ROOT / "kernels") or folder == "tccompile" if text.search(p.read_text())]  # fmt: skip
    assert {p.as_posix().removeprefix("tccompile/") for p in found} == {"kernels/ptx/atoms.py"}
