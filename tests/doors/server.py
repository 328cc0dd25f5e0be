"""NVIDIA's Triton Inference Server, of the wheel nvidia-pytriton, on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

READY = 120.0
"""Seconds within which a server has to be there."""


@dataclass(frozen=True)
class Server:
    """A server that runs: its ports, its process, and where it writes what it does."""

    http: int
    grpc: int
    process: subprocess.Popen[bytes]
    log: Path


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def unpacked(folder: Path) -> tuple[Path, Path, dict[str, str]]:
    """The server of the wheel, a copy of its backends with the stub of this interpreter's version, and its environment."""
    spec = find_spec("pytriton")
    assert spec is not None and spec.origin is not None
    server = Path(spec.origin).parent / "tritonserver"
    backends = folder / "backends"
    shutil.copytree(server / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = next((server / "python_backend_stubs" / version).glob("triton_python_backend_stub"))
    shutil.copy(stub, backends / "python" / stub.name)
    libraries = [server.parents[1] / "nvidia_pytriton.libs", Path(sysconfig.get_config_var("LIBDIR")), backends / "python"]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),  # where the stub looks for packages
    }
    return server / "bin" / "tritonserver", backends, environment


@contextmanager
def serving(repository: Path, folder: Path, models: tuple[str, ...], *options: str) -> Iterator[Server]:
    """A server of a repository, when these models are ready; RuntimeError with the end of its log if they do not get so.

    folder  for its log and its backends
    """
    import tritonclient.grpc as client

    program, backends, environment = unpacked(folder)
    http, grpc = free_ports(2)
    arguments = [f"--model-repository={repository}", f"--backend-directory={backends}", "--allow-metrics=false"]
    arguments += [f"--http-port={http}", f"--grpc-port={grpc}", "--http-address=127.0.0.1", "--grpc-address=127.0.0.1"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([program, *arguments, *options], env=environment, stdout=log, stderr=log)
    try:
        with client.InferenceServerClient(f"127.0.0.1:{grpc}") as asked:
            deadline = time.monotonic() + READY
            while not _ready(asked, models):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "log").read_text()[-4000:])
                time.sleep(0.2)
        yield Server(http, grpc, process, folder / "log")
    finally:
        process.terminate()
        process.wait(60)


def _ready(client: object, models: tuple[str, ...]) -> bool:
    try:
        return client.is_server_ready() and all(map(client.is_model_ready, models))  # type: ignore[attr-defined]
    except Exception:  # it does not listen yet
        return False
