"""A numbered dump of every stage: ONNX files while the graph is still ONNX, text afterwards, and each kernel's code.

00-load.onnx  01-rewrite.onnx  01-rewrite.txt  02-lower.txt  03-fuse.txt  04-precision.txt  05-layout.txt
06-schedule.sm_90a.txt …       07-place.sm_90a.txt …      kernels/NAME-DIGEST.sm_90a.cubin …
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tccompile.ir.program import Program
from tccompile.ir.text import program_text

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

    from tccompile.plan.format import Image
    from tccompile.schedule.choose import Choice
    from tccompile.schedule.place import Placement


class Dump:
    """Writes what each stage made into a folder; does nothing when there is none. `entry` names the files of later entries."""

    def __init__(self, folder: Path | None, entry: int = 0):
        self.folder = folder
        self.suffix = f".entry{entry}" if entry else ""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def graph(self, number: int, stage: str, graph: gs.Graph) -> None:
        if self.folder is not None:
            import onnx
            import onnx_graphsurgeon as gs
            from onnx.external_data_helper import set_external_data
            from onnx_graphsurgeon.logger import G_LOGGER

            from tccompile.load.constants import decisive

            path = self.folder / f"{number:02}-{stage}{self.suffix}.onnx"
            weights = path.with_suffix(".onnx.weights")
            weights.unlink(missing_ok=True)  # onnx would append to those of an earlier dump
            with G_LOGGER.suppress(), decisive():  # nothing is decided by what is written
                model = gs.export_onnx(graph)
            for tensor in model.graph.initializer:
                if len(tensor.raw_data) >= 1024:
                    set_external_data(tensor, weights.name)
            onnx.save(model, path)

    def rewrites(self, number: int, stage: str, applied: Mapping[str, Collection[str]]) -> None:
        """What each rewrite did: its equation, and the nodes that computed what it replaced."""
        lines = [f"{equation}\n" + "".join(f"    {name}\n" for name in names) for equation, names in applied.items()]
        self._text(f"{number:02}-{stage}{self.suffix}.txt", "".join(lines))

    def program(self, number: int, stage: str, program: Program) -> None:
        self._text(f"{number:02}-{stage}{self.suffix}.txt", program_text(program))

    def choices(self, number: int, stage: str, arch: str, program: Program, choices: Sequence[Choice]) -> None:
        lines = [
            f"{op.nodes[0]}: {type(op).__name__} by {choice.kernel.name} {dict(choice.config)}\n    {choice.reason}\n"
            + "".join(
                f"    {launch.code.kernel} grid {launch.grid} block {launch.block} smem {launch.smem}\n"
                for launch in choice.work.launches
            )
            for op, choice in zip(program.ops, choices, strict=True)
        ]
        self._text(f"{number:02}-{stage}{self.suffix}.{arch}.txt", "".join(lines))

    def placement(self, number: int, stage: str, arch: str, program: Program, placement: Placement) -> None:
        lines = [f"arena {placement.arena} bytes, counters {placement.counters} bytes\n"]
        lines += [f"{offset:12} {name}\n" for name, offset in sorted(placement.offsets.items(), key=lambda item: item[1])]
        lines += [
            f"step {i} {op.nodes[0]} after {list(after)}\n"
            for i, (op, after) in enumerate(zip(program.ops, placement.after, strict=True))
        ]
        self._text(f"{number:02}-{stage}{self.suffix}.{arch}.txt", "".join(lines))

    def images(self, images: Sequence[Image]) -> None:
        if self.folder is not None:
            (self.folder / "kernels").mkdir(exist_ok=True)
            for image in images:
                digest = hashlib.sha256(image.code).hexdigest()[:12]  # one kernel comes in several configs
                (self.folder / "kernels" / f"{image.function}-{digest}.{image.arch}.{image.kind}").write_bytes(image.code)

    def _text(self, name: str, text: str) -> None:
        if self.folder is not None:
            (self.folder / name).write_text(text, encoding="utf-8")
