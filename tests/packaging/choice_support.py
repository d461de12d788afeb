"""Published wheels of a few bytes, an sdist that lists them, and a server with every fault there is."""

from __future__ import annotations

import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from packaging_support import ROOT, clean_environ

sys.path.append(str(ROOT / "tests" / "unit"))

from buildtools_support import make_tree

from buildtools.build import build_info_text
from buildtools.manifest import MANIFEST_NAME, make_manifest
from buildtools.metadata import load_project
from buildtools.wheel import DEFAULT_EPOCH, dist_info, write_wheel

VERSION = load_project(ROOT).base_version
PLATFORM = "manylinux_2_28_x86_64"
HERE = "manylinux_2_17_x86_64"  # for every glibc that a test may run on


# A host library for one torch; before 2.7 it needs that torch's headers.
ROW = """
[host_libraries."torch{0}"]
abi = "torch"
torch = "=={0}.*"
cxx11_abi = {1}
headers = "{0}.0"
machine = "x86_64"
platform = "manylinux_2_28_x86_64"
"""


def make_published(
    folder: Path, torch: str = ">=2.10", abi: int | None = None, platform: str = HERE, *, padding: int = 200_000
) -> Path:
    """A wheel as the project publishes it, with a library and kernels of random bytes."""
    label = "" if abi is None else f"torch{torch.strip('=.*')}.cxx11abi{abi}"
    project = load_project(ROOT, label)
    project = replace(project, fields={**project.fields, "dependencies": [f"torch{torch}"]})
    kernel_set = {"compiler": "nvrtc 12.9.86", "archs": ["80", "86", "90", "ptx80"], "keys": ["k"], "sha256": "0" * 64}
    host = {"kind": "stable" if abi is None else "torch", "torch": torch, "platform": platform, "compiler": "g++ 12"}
    noise = b"".join(bytes([i % 251]) + struct.pack("<I", i * 2654435761 % 2**32) for i in range(padding // 5))
    files = {
        "flash_attn/__init__.py": f'__version__ = "{VERSION}"\n'.encode(),
        "flash_attn/flash_attn.kernels": noise,
        "flash_attn/libflash_attn.so": noise[:100],
        "flash_attn/build_info.json": build_info_text(VERSION, kernel_set, {**host, "cxx11_abi": abi != 0}),
    }
    return folder / write_wheel(folder, project, f"py3-none-{platform}", files, DEFAULT_EPOCH)


def make_sdist_tree(folder: Path, wheels: Sequence[Path], places: Sequence[str] = ()) -> Path:
    """An unpacked sdist whose sources compile in a second; `wheels` are those that it says are published."""
    tree = make_tree(folder)
    matrix = tree / "matrix.toml"
    matrix.write_text(matrix.read_text() + rows_for_one_torch())
    exports = tree / "csrc/host/compat/exports.map"
    exports.parent.mkdir()
    exports.write_text("{ global: flash_attn_*; local: *; };\n")
    (tree / "PKG-INFO").write_bytes(
        dist_info(load_project(tree), "py3-none-any")[f"flash_attn-{VERSION}.dist-info/METADATA"]
    )
    (tree / MANIFEST_NAME).write_text(make_manifest(wheels, VERSION, places).text())
    return tree


HOOK = """
import functools, os, sys
sys.path.insert(0, ".")
from buildtools import backend, fetch, prebuilt
sys.path[:0] = filter(None, os.environ.get("FLASH_ATTN_TEST_SITE", "").split(":"))
silence_s, slow_s, pause_s = 1, 1, 0.05
prebuilt.obtain = functools.partial(prebuilt.obtain, limits=fetch.Limits(silence_s, slow_s, 20_000, 3, pause_s))
print(getattr(backend, sys.argv[1])(*sys.argv[2:]))
"""


@dataclass
class Hook:
    """The hooks of a source tree, called as a frontend does; no compiler can be started without it being seen.

    FLASH_ATTN_TEST_SITE puts folders before the environment's own, which may have a torch.
    """

    tree: Path
    output: Path
    may_compile: bool = False

    @property
    def environ(self) -> dict[str, str]:
        environ = clean_environ(**{} if self.may_compile else {"CXX": str(self.compiler)})
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"):
            environ.pop(name, None)
        return environ

    @property
    def compiler(self) -> Path:
        """A g++ that says that it was started."""
        path = self.tree / "compiler"
        path.write_text(f"#!/bin/sh\ntouch {self.tree}/compiler-was-started\nexit 1\n")
        path.chmod(0o755)
        return path

    def command(self, hook: str = "build_wheel") -> list[str]:
        return [sys.executable, "-c", HOOK, hook, str(self.output)]

    def run(
        self, hook: str = "build_wheel", *, under: Sequence[str] = (), timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        self.output.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            [*under, *self.command(hook)],
            cwd=self.tree, env=self.environ | variables, capture_output=True, encoding="utf-8", timeout=timeout,
            check=False,
        )  # fmt: skip

    def compiled(self) -> bool:
        return (self.tree / "compiler-was-started").exists() or (self.tree / "build").exists()


def make_build_requirements(folder: Path) -> list[Path]:
    """The wheels that build-system.requires needs on this Python: none, or before 3.11 tomli."""
    if sys.version_info >= (3, 11):
        return []
    import tomli

    version, info = metadata.version("tomli"), f"tomli-{metadata.version('tomli')}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tomli-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file in Path(tomli.__file__).parent.glob("*.*"):
            wheel.write(file, f"tomli/{file.name}")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tomli\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return [path]


def make_site(folder: Path, torch: str, *, cuda: str | None = "12.4") -> Path:
    """A site-packages with a torch that can only be read, not imported."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text("raise ImportError('torch was imported')\n")
    (folder / "torch/version.py").write_text(f"__version__ = '{torch}'\ncuda: Optional[str] = {cuda!r}\n")
    return folder


def rows_for_one_torch() -> str:
    """Stanzas of matrix.toml for torch 2.6 and 2.7."""
    return ROW.format("2.6", "false") + ROW.format("2.7", "true").replace('headers = "2.7.0"\n', "")


NVML = """
#include <string.h>
#define API extern "C" int
API nvmlInit_v2() { return 0; }
API nvmlShutdown() { return 0; }
API nvmlSystemGetDriverVersion(char* text, unsigned) { strcpy(text, "570.86.15"); return 0; }
API nvmlSystemGetCudaDriverVersion_v2(int* number) { *number = 12080; return 0; }
API nvmlDeviceGetCount_v2(unsigned* count) { *count = 2; return 0; }
API nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) { *device = (void*)(long)(index + 1); return 0; }
API nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) {
  *major = device == (void*)1 ? 9 : 7; *minor = device == (void*)1 ? 0 : 5; return 0;
}
"""


def make_driver(folder: Path) -> Path:
    """A folder for LD_LIBRARY_PATH with the driver of a machine that has a GPU of 9.0 and one of 7.5."""
    folder.mkdir(parents=True)
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run(command, input=NVML, text=True, check=True)
    return folder


# --- a server with faults ------------------------------------------------------------------------------------------

Fault = Callable[["Exchange"], None]


@dataclass
class Exchange:
    """One request: `send` answers; `content` is the file that was asked for, or None."""

    connection: socket.socket
    path: str
    content: bytes | None
    server: FaultServer

    def send(self, status: str, body: bytes = b"", *headers: str, length: int | None = None) -> None:
        head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", "Connection: close"]
        self.connection.sendall("\r\n".join([*head, *headers, "", ""]).encode() + body)

    def reset(self) -> None:
        """End the connection as a broken one ends."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


@dataclass
class FaultServer:
    """A loopback server of the files in `folder`; `fault` answers instead where it is given a wheel."""

    folder: Path
    fault: Fault | None = None
    requests: list[str] = field(default_factory=list)
    url: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[FaultServer]:
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer._handle(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # clients that gave up are what is tested

        with Server(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_address[1]}/"
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.stopped.set()
                server.shutdown()
                thread.join()

    def _handle(self, connection: socket.socket) -> None:
        request = b""
        while b"\r\n\r\n" not in request:
            received = connection.recv(4096)
            if not received:
                return
            request += received
            if not request[:1].isalpha():  # the beginning of TLS
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                return
        path = urllib.parse.unquote(request.split()[1].decode())
        self.requests.append(path)
        name = path.rpartition("/")[2]
        file = self.folder / name
        exchange = Exchange(connection, path, file.read_bytes() if name and file.is_file() else None, self)
        if self.fault and name.endswith(".whl"):
            self.fault(exchange)
        elif exchange.content is None:
            exchange.send("404 Not Found", b"<html>no such file</html>", "Content-Type: text/html")
        else:
            exchange.send("200 OK", exchange.content)

    def wait(self, seconds: float) -> None:
        """Be silent, but not longer than the test."""
        self.stopped.wait(seconds)


def trickle(exchange: Exchange, data: bytes, pause_s: float) -> None:
    """Send `data` byte by byte."""
    for byte in data:
        if exchange.server.stopped.is_set():
            return
        exchange.connection.sendall(bytes([byte]))
        time.sleep(pause_s)


def in_namespace(setup: str, *, network: bool = True) -> list[str]:
    """What to put before a command so that it has mounts (made by `setup`) or no network of its own; needs root."""
    return ["unshare", "--mount" if network else "--net", "sh", "-ec", f'{setup}\nexec "$@"', "sh"]
