"""What a wheel holds of the tables beside this file: the same, compressed. They are for compiling, and running a plan reads none.

In the repository they are JSON, an op a line, so that a diff shows what was measured anew.
"""

import gzip
from pathlib import Path

from setuptools.command.build_py import build_py


class Packed(build_py):
    def build_package_data(self) -> None:
        super().build_package_data()
        for table in Path(self.build_lib, "tccompile/kernels/timings").glob("*.json"):
            table.with_suffix(".json.gz").write_bytes(gzip.compress(table.read_bytes(), 9, mtime=0))  # the same in each build
            table.unlink()
