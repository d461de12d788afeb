"""What can go wrong between a published wheel and this machine: the message, the exit code, and nothing left behind.

Each is a real PEP 517 hook in a process of its own, against a real server on loopback. Field cases 6, 7 and 43.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from choice_support import Exchange, FaultServer, Hook, in_namespace, make_published, make_sdist_tree, trickle

from buildtools import errors, fetch
from buildtools.manifest import read_wheel

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and network namespaces need root")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_published(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def tree(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdist_tree(tmp_path_factory.mktemp("tree") / "tree", [wheel])


@pytest.fixture
def hook(tree: Path, tmp_path: Path) -> Iterator[Hook]:
    hook = Hook(tree, tmp_path / "output")
    yield hook
    assert not hook.compiled()  # none of these tests allows a compiler


def ok(exchange: Exchange) -> None:
    assert exchange.content is not None
    exchange.send("200 OK", exchange.content)


def status(text: str):
    return lambda exchange: exchange.send(text, b"<html>sorry</html>", "Content-Type: text/html")


def reset_at_once(exchange: Exchange) -> None:
    exchange.reset()


def reset_in_the_middle(exchange: Exchange) -> None:
    exchange.send("200 OK", exchange.content[:50_000], length=len(exchange.content))
    exchange.reset()


def closed_at_once(exchange: Exchange) -> None:
    exchange.connection.close()


def silence(exchange: Exchange) -> None:
    exchange.server.wait(20)


def silence_in_the_middle(exchange: Exchange) -> None:
    exchange.send("200 OK", exchange.content[:50_000], length=len(exchange.content))
    exchange.server.wait(20)


def header_that_trickles(exchange: Exchange) -> None:
    trickle(exchange, b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1000, 0.1)


def body_that_trickles(exchange: Exchange) -> None:
    exchange.send("200 OK", b"", length=len(exchange.content))
    trickle(exchange, exchange.content, 0.05)


def truncated(exchange: Exchange) -> None:
    exchange.send("200 OK", exchange.content[:-1000], length=len(exchange.content))


def truncated_without_length(exchange: Exchange) -> None:
    head = b"HTTP/1.0 200 OK\r\nConnection: close\r\n\r\n"
    exchange.connection.sendall(head + exchange.content[:-1000])


def page(exchange: Exchange) -> None:
    exchange.send(
        "200 OK", b"<!DOCTYPE html><html><h1>Please log in</h1></html>", "Content-Type: text/html; charset=utf-8"
    )


def nothing(exchange: Exchange) -> None:
    exchange.send("200 OK", b"")


def other_wheel(exchange: Exchange) -> None:
    exchange.send("200 OK", exchange.content[:4] + bytes(len(exchange.content) - 4))


def flipped_bit(exchange: Exchange) -> None:
    changed = bytearray(exchange.content)
    changed[len(changed) // 2] ^= 1
    exchange.send("200 OK", bytes(changed))


def too_long(exchange: Exchange) -> None:
    exchange.send("200 OK", exchange.content + b"more")


def shorter_but_whole(exchange: Exchange) -> None:
    exchange.send("200 OK", exchange.content[:-1000])


def to_another_host(exchange: Exchange) -> None:
    port = exchange.server.url.rpartition(":")[2]
    exchange.send("302 Found", b"", f"Location: http://localhost:{port}{exchange.path}")


def round_and_round(exchange: Exchange) -> None:
    exchange.send("302 Found", b"", f"Location: {exchange.path}")


def garbage(exchange: Exchange) -> None:
    exchange.connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")


FAULTS = [
    (status("404 Not Found"), errors.FileNotThereError, "answers 404 Not Found", 1),
    pytest.param(status("410 Gone"), errors.FileNotThereError, "answers 410 Gone", 1, marks=pytest.mark.slow),
    (status("403 Forbidden"), errors.AccessDeniedError, "answers 403 Forbidden", 1),
    pytest.param(
        status("401 Unauthorized"), errors.AccessDeniedError, "answers 401 Unauthorized", 1, marks=pytest.mark.slow
    ),
    pytest.param(status("418 I'm a teapot"), errors.NotAWheelError, "answers 418", 1, marks=pytest.mark.slow),
    (status("500 Oops"), errors.ServerError, "answers 500 Oops (3 attempts)", 3),
    pytest.param(status("503 Busy"), errors.ServerError, "answers 503 Busy (3 attempts)", 3, marks=pytest.mark.slow),
    (reset_at_once, errors.ConnectionFailedError, "the connection failed or broke off", 3),
    pytest.param(
        reset_in_the_middle,
        errors.ConnectionFailedError,
        "the connection failed or broke off",
        3,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        closed_at_once, errors.ConnectionFailedError, "the connection failed or broke off", 3, marks=pytest.mark.slow
    ),
    pytest.param(
        garbage, errors.ConnectionFailedError, "the connection failed or broke off", 3, marks=pytest.mark.slow
    ),
    (silence, errors.SilentServerError, "nothing came for 1 s", 1),
    (silence_in_the_middle, errors.SilentServerError, "nothing came for 1 s", 1),
    (header_that_trickles, errors.SilentServerError, "nothing came for 1 s", 1),
    (body_that_trickles, errors.SlowServerError, "bytes a second", 1),
    (truncated, errors.TruncatedError, "(3 attempts)", 3),
    pytest.param(truncated_without_length, errors.TruncatedError, "(3 attempts)", 3, marks=pytest.mark.slow),
    (page, errors.NotAWheelError, "is no wheel, but text/html: it begins with 'Please log in'", 1),
    (nothing, errors.NotAWheelError, "it begins with ''", 1),
    pytest.param(other_wheel, errors.AlteredFileError, "nothing of it is kept", 1, marks=pytest.mark.slow),
    (flipped_bit, errors.AlteredFileError, "that was published: sha256", 1),
    (too_long, errors.AlteredFileError, "more than", 1),
    pytest.param(shorter_but_whole, errors.AlteredFileError, "that was published: sha256", 1, marks=pytest.mark.slow),
    (to_another_host, errors.RedirectError, "leads to another host: http://localhost:", 1),
    (round_and_round, errors.RedirectError, "infinite loop", None),
]


@pytest.mark.parametrize(
    ("fault", "kind", "message", "requests"), FAULTS, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_fault(
    hook: Hook, wheel: Path, fault, kind: type[errors.DownloadError], message: str, requests: int | None
) -> None:
    """Case 6 for the silent ones, case 43 for the flipped bit; each ends in seconds, with one story."""
    started = time.monotonic()
    with FaultServer(wheel.parent, fault).running() as server:
        result = hook.run(FLASH_ATTN_WHEELS=server.url)
        asked = [path for path in server.requests if path.endswith(".whl")]
    assert result.returncode == kind.exit_code, result.stderr
    assert time.monotonic() - started < 10
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr
    text = result.stderr.partition("error: ")[2]
    assert message in text
    assert "looked for a wheel for torch" in text  # the key
    assert f"found {wheel.name}" in text
    assert "no compiler was started" in text
    assert "FORCE_BUILD=1" in text  # what to do
    assert list(hook.output.iterdir()) == []
    assert requests is None or len(asked) == requests


def test_what_passes_is_tried_again(hook: Hook, wheel: Path) -> None:
    attempts = []

    def twice_wrong(exchange: Exchange) -> None:
        attempts.append(exchange.path)
        (reset_in_the_middle, truncated, ok)[len(attempts) - 1](exchange)

    with FaultServer(wheel.parent, twice_wrong).running() as server:
        result = hook.run(FLASH_ATTN_WHEELS=server.url)
    assert result.returncode == 0, result.stderr
    assert "attempt 3 of 3 follows" in result.stderr
    assert [path.name for path in hook.output.iterdir()] == [wheel.name]
    assert (hook.output / wheel.name).read_bytes() == wheel.read_bytes()


def test_a_redirect_within_the_host_is_followed(hook: Hook, wheel: Path) -> None:
    def once(exchange: Exchange) -> None:
        if exchange.path.startswith("/files/"):
            ok(exchange)
        else:
            exchange.send("302 Found", b"", f"Location: /files{exchange.path}")

    with FaultServer(wheel.parent, once).running() as server:
        assert hook.run(FLASH_ATTN_WHEELS=server.url).returncode == 0


def test_a_redirect_to_a_host_that_is_named_too(hook: Hook, wheel: Path) -> None:
    """And the name and password of the first host do not go along."""
    with FaultServer(wheel.parent, ok).running() as files:
        other = files.url.replace("127.0.0.1", "localhost")
        with FaultServer(
            wheel.parent, lambda e: e.send("302 Found", b"", f"Location: {other[:-1]}{e.path}")
        ).running() as first:
            places = f"{first.url.replace('//', '//user:secret@')} {other}"
            result = hook.run(FLASH_ATTN_WHEELS=places)
    assert result.returncode == 0, result.stderr
    assert "secret" not in result.stderr + result.stdout
    assert (hook.output / wheel.name).is_file()


def test_nobody_listens(hook: Hook) -> None:
    result = hook.run(FLASH_ATTN_WHEELS="http://127.0.0.1:9/")
    assert result.returncode == errors.ConnectionFailedError.exit_code
    assert "Connection refused (3 attempts)" in result.stderr
    assert "set FLASH_ATTN_WHEELS to a folder" in result.stderr


def test_a_port_that_speaks_no_tls(hook: Hook, wheel: Path) -> None:
    with FaultServer(wheel.parent).running() as server:
        result = hook.run(FLASH_ATTN_WHEELS=server.url.replace("http:", "https:"))
    assert result.returncode == errors.ConnectionFailedError.exit_code
    assert list(hook.output.iterdir()) == []


@ROOT_ONLY
def test_no_network_at_all(hook: Hook, wheel: Path) -> None:
    """Case 7: a name cannot be looked up, and a folder needs no network."""
    no_network = in_namespace("", network=False)
    result = hook.run(under=no_network, FLASH_ATTN_WHEELS="https://wheels.example/simple/")
    assert result.returncode == errors.ConnectionFailedError.exit_code, result.stderr
    assert "there is no such host, or no network" in result.stderr
    assert list(hook.output.iterdir()) == []
    result = hook.run(under=no_network, FLASH_ATTN_WHEELS=str(wheel.parent))
    assert result.returncode == 0, result.stderr
    assert (hook.output / wheel.name).read_bytes() == wheel.read_bytes()


def test_a_mirror_and_no_connection_anywhere_else(hook: Hook, wheel: Path, tmp_path: Path) -> None:
    """Case 7: a proxy would see every connection to another host, and sees none."""
    with FaultServer(wheel.parent).running() as mirror, FaultServer(tmp_path).running() as proxy:
        result = hook.run(FLASH_ATTN_WHEELS=mirror.url, HTTP_PROXY=proxy.url, HTTPS_PROXY=proxy.url)
        assert result.returncode == 0, result.stderr
        assert proxy.requests == []
        assert mirror.requests[-1] == f"/{wheel.name}"


def test_a_folder_without_the_wheel(hook: Hook, tmp_path: Path) -> None:
    make_published(tmp_path / "other", "==2.6.*", 0, padding=10)
    result = hook.run(FLASH_ATTN_WHEELS=str(tmp_path / "other"))
    assert result.returncode == errors.FileNotThereError.exit_code
    assert "it has flash_attn-2.9.0+torch2.6.cxx11abi0" in result.stderr
    result = hook.run(FLASH_ATTN_WHEELS=str(tmp_path / "nowhere"))
    assert result.returncode == errors.FileNotThereError.exit_code
    assert "it is no folder" in result.stderr


@pytest.mark.parametrize(
    "change", [lambda data: data[:-5], lambda data: b"<html>" + data, lambda data: data[:9] + b"!" + data[10:]]
)
def test_a_wheel_in_a_folder_is_checked_too(hook: Hook, wheel: Path, tmp_path: Path, change) -> None:
    """Case 43, without a network."""
    (tmp_path / wheel.name).write_bytes(change(wheel.read_bytes()))
    result = hook.run(FLASH_ATTN_WHEELS=str(tmp_path))
    assert result.returncode in (errors.AlteredFileError.exit_code, errors.NotAWheelError.exit_code)
    assert list(hook.output.iterdir()) == []


# --- the target folder ---------------------------------------------------------------------------------------------


def test_temporary_files_on_another_file_system(hook: Hook, wheel: Path) -> None:
    """Nothing is moved from one to the other: the file is written where it belongs."""
    other = Path("/dev/shm")
    assert other.stat().st_dev != hook.tree.stat().st_dev
    before = set(other.iterdir())
    with FaultServer(wheel.parent).running() as server:
        assert hook.run(FLASH_ATTN_WHEELS=server.url, TMPDIR=str(other)).returncode == 0
    assert set(other.iterdir()) == before
    assert [path.name for path in hook.output.iterdir()] == [wheel.name]


@ROOT_ONLY
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ("ro", errors.TargetFolderError, "cannot be written: Read-only file system"),
        ("size=64k", errors.DiskFullError, "has no room for"),
    ],
)
def test_the_target_folder(
    hook: Hook, wheel: Path, options: str, kind: type[errors.DownloadError], message: str
) -> None:
    hook.output.mkdir()
    with FaultServer(wheel.parent).running() as server:
        mounted = in_namespace(f"mount -t tmpfs -o {options} tmpfs {hook.output}")
        result = hook.run(under=mounted, FLASH_ATTN_WHEELS=server.url)
        assert server.requests == [] or options == "ro"
    assert result.returncode == kind.exit_code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_read_only_cache_does_not_matter(hook: Hook, wheel: Path) -> None:
    """There is none: nothing but the target folder is written."""
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        assert hook.run(FLASH_ATTN_WHEELS=str(wheel.parent), **{name: "/proc/none"}).returncode == 0


def test_the_disk_fills_up_while_it_is_written(wheel: Path, tmp_path: Path) -> None:
    """In a process whose files may not grow past 100 kB: the write fails in the middle."""
    code = f"""
import resource, sys
from pathlib import Path
from buildtools import errors, fetch, manifest
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    fetch.fetch(manifest.read_wheel(Path({str(wheel)!r})), fetch.parse_places({str(wheel.parent)!r}), Path("output"))
except errors.DiskFullError as error:
    print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    environ = {**os.environ, "PYTHONPATH": str(Path(fetch.__file__).parent.parent)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, encoding="utf-8", check=True
    )
    assert f"output has no room for {wheel.name}" in result.stdout
    assert list((tmp_path / "output").iterdir()) == []


def test_two_at_once_into_one_folder(hook: Hook, wheel: Path) -> None:
    def slowly(exchange: Exchange) -> None:
        exchange.send("200 OK", exchange.content[:100_000], length=len(exchange.content))
        time.sleep(0.5)
        exchange.connection.sendall(exchange.content[100_000:])

    hook.output.mkdir()
    with FaultServer(wheel.parent, slowly).running() as server:
        environ = hook.environ | {"FLASH_ATTN_WHEELS": server.url}
        both = [subprocess.Popen(hook.command(), cwd=hook.tree, env=environ, stderr=subprocess.PIPE) for _ in range(2)]
        assert [process.wait(30) for process in both] == [0, 0], [process.stderr.read() for process in both]
    assert [path.name for path in hook.output.iterdir()] == [wheel.name]
    assert (hook.output / wheel.name).read_bytes() == wheel.read_bytes()


# --- killed --------------------------------------------------------------------------------------------------------


def kill_while_downloading(command: list[str], cwd: Path, environ: dict[str, str], server: FaultServer) -> None:
    process = subprocess.Popen(command, cwd=cwd, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not any(path.endswith(".whl") for path in server.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)  # the first bytes are on the disk
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_killed_in_a_download(hook: Hook, wheel: Path) -> None:
    """The file has no name before it is whole, so there is nothing to clean up."""
    hook.output.mkdir()
    with FaultServer(wheel.parent, silence_in_the_middle).running() as server:
        kill_while_downloading(hook.command(), hook.tree, hook.environ | {"FLASH_ATTN_WHEELS": server.url}, server)
    assert list(hook.output.iterdir()) == []
    assert hook.run(FLASH_ATTN_WHEELS=str(wheel.parent)).returncode == 0


def test_killed_where_files_need_a_name(hook: Hook, wheel: Path) -> None:
    """On file systems without nameless files the next download removes what a killed one left."""
    hook.output.mkdir()
    code = hook.command()[2].replace("print(getattr", "import os; del os.O_TMPFILE\nprint(getattr")
    command = [sys.executable, "-c", code, "build_wheel", str(hook.output)]
    with FaultServer(wheel.parent, silence_in_the_middle).running() as server:
        kill_while_downloading(command, hook.tree, hook.environ | {"FLASH_ATTN_WHEELS": server.url}, server)
    (left,) = hook.output.iterdir()
    assert left.name.endswith(".part")
    environ = hook.environ | {"FLASH_ATTN_WHEELS": str(wheel.parent)}
    subprocess.run(command, cwd=hook.tree, env=environ, check=True, capture_output=True)
    assert [path.name for path in hook.output.iterdir()] == [wheel.name]


def test_interrupted_by_a_person(hook: Hook, wheel: Path) -> None:
    hook.output.mkdir()
    with FaultServer(wheel.parent, silence_in_the_middle).running() as server:
        environ = hook.environ | {"FLASH_ATTN_WHEELS": server.url}
        process = subprocess.Popen(hook.command(), cwd=hook.tree, env=environ, stderr=subprocess.DEVNULL)
        while not any(path.endswith(".whl") for path in server.requests):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) != 0
    assert list(hook.output.iterdir()) == []


def test_a_wheel_that_is_there_already_is_not_fetched_again(wheel: Path, tmp_path: Path) -> None:
    published, lines = read_wheel(wheel), []
    (tmp_path / wheel.name).write_bytes(b"PK\x03\x04 a damaged one")
    fetch.fetch(published, fetch.parse_places(str(wheel.parent)), tmp_path)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    fetch.fetch(published, [], tmp_path, report=lines.append)
    assert lines == [f"{tmp_path / wheel.name} is there already"]
