"""Published wheels through the sdist, by real pip and uv, from loopback indexes. Field cases 5, 6, 7, 10, 11 and 43."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from choice_support import VERSION, FaultServer, Hook, make_build_requirements, make_published, make_sdist_tree
from packaging_support import Environment, build_hook, clean_environ, make_torch

from buildtools.index import serving, write_index


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    make_published(folder)
    make_published(folder, "==2.6.*", 0)
    return folder


@pytest.fixture(scope="module")
def tree(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist that lists `dist`, whose sources compile in a second."""
    return make_sdist_tree(tmp_path_factory.mktemp("tree") / "tree", sorted(dist.iterdir()))


@pytest.fixture(scope="module")
def listing(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist that lists `dist`."""
    return build_hook("build_sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def index(listing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an index with the sdist, and torch 2.13 and 2.6 of a few bytes."""
    folder = tmp_path_factory.mktemp("index")
    torches = [make_torch(folder / "torches", version) for version in ("2.6.0", "2.13.0")]
    write_index([listing, *torches, *make_build_requirements(folder / "requirements")], folder / "index")
    with serving(folder / "index") as url:
        yield f"{url}stable/"


@pytest.fixture
def offline(dist: Path, tmp_path: Path) -> dict[str, str]:
    """pip without any index and without a compiler."""
    (tmp_path / "requirements").mkdir()
    make_build_requirements(tmp_path / "requirements")
    links = str(tmp_path / "requirements")
    return clean_environ(FLASH_ATTN_WHEELS=str(dist), CXX="/none", PIP_FIND_LINKS=links)


def installed(environment: Environment) -> tuple[str | None, str | None]:
    return environment.version("flash-attn"), environment.version("torch")


STABLE, OF_2_6 = VERSION, f"{VERSION}+torch2.6.cxx11abi0"


# --- pip -----------------------------------------------------------------------------------------------------------


def test_pip_installs_the_published_wheel_and_leaves_torch_alone(
    environment: Environment, index: str, dist: Path, tmp_path: Path
) -> None:
    """Cases 7 and 10, with build isolation: the torch of the environment decides, and it stays."""
    environment.pip("install", make_torch(tmp_path, "2.6.0"))
    environ = clean_environ(FLASH_ATTN_WHEELS=str(dist), CXX="/none")
    log = environment.pip("install", "-v", f"flash-attn=={VERSION}", "--index-url", index, environ=environ)
    assert f"found flash_attn-{OF_2_6}-py3-none-" in log
    assert installed(environment) == (OF_2_6, "2.6.0")
    environment.pip("check")


@pytest.mark.slow
@pytest.mark.parametrize("torch", ["2.6.0", "2.13.0", None])
@pytest.mark.parametrize("options", [(), ("--no-build-isolation",), ("--no-build-isolation", "--no-deps")])
def test_pip(
    environment: Environment, index: str, dist: Path, tmp_path: Path, torch: str | None, options: tuple
) -> None:
    if torch:
        environment.pip("install", make_torch(tmp_path, torch))
    environ = clean_environ(FLASH_ATTN_WHEELS=str(dist), CXX="/none")
    environment.pip("install", *options, "flash-attn", "--index-url", index, environ=environ)
    wanted = OF_2_6 if torch == "2.6.0" else STABLE
    assert installed(environment) == (wanted, torch or (None if "--no-deps" in options else "2.13.0"))


def test_pip_and_an_altered_wheel(environment: Environment, listing: Path, dist: Path, offline: dict[str, str]) -> None:
    """Case 43: pip fails, with the one message, and installs nothing."""

    def flipped(exchange) -> None:
        exchange.send("200 OK", exchange.content[:-1] + bytes([exchange.content[-1] ^ 1]))

    with FaultServer(dist, flipped).running() as server:
        environ = offline | {"FLASH_ATTN_WHEELS": server.url}
        log = environment.pip("install", "--no-deps", listing, environ=environ, fails=True)
    assert "that was published: sha256" in log
    assert "nothing was installed, and no compiler was started" in log
    assert "Traceback" not in log
    assert environment.version("flash-attn") is None


@pytest.mark.slow
def test_pip_and_a_silent_server(environment: Environment, listing: Path, dist: Path, offline: dict[str, str]) -> None:
    """Case 6, with the time-out that users have."""
    with FaultServer(dist, lambda exchange: exchange.server.wait(60)).running() as server:
        started = time.monotonic()
        environ = offline | {"FLASH_ATTN_WHEELS": server.url}
        log = environment.pip("install", "--no-deps", listing, environ=environ, fails=True)
    assert "nothing came for 20 s" in log
    assert time.monotonic() - started < 45


@pytest.mark.slow
def test_pip_and_a_miss(environment: Environment, listing: Path, tmp_path: Path, offline: dict[str, str]) -> None:
    """Case 5: pip shows the trace."""
    environment.pip("install", make_torch(tmp_path, "3.0.0"))
    environ = offline | {"FLASH_ATTN_NO_BUILD": "1"}
    log = environment.pip("install", "--no-deps", listing, environ=environ, fails=True)
    assert "looked for a wheel for torch3.0.0-" in log
    assert "torch 3 is newer than what it was made for" in log


@pytest.mark.slow
def test_pip_with_a_cache_that_it_cannot_write(
    environment: Environment, listing: Path, tmp_path: Path, offline: dict[str, str]
) -> None:
    """And with temporary files on another file system than the cache and the environment."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    if os.geteuid() == 0:  # root can write anything; pip leaves alone what belongs to somebody else
        os.chown(cache, 65534, 65534)
    environ = offline | {"TMPDIR": "/dev/shm", "PIP_CACHE_DIR": str(cache)}
    del environ["PIP_NO_CACHE_DIR"]
    before = set(os.listdir("/dev/shm"))
    environment.pip("install", "--no-deps", listing, environ=environ)
    assert environment.version("flash-attn") == STABLE
    assert list(cache.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.slow
def test_two_pips_at_once(tmp_path: Path, listing: Path, offline: dict[str, str]) -> None:
    environments = [Environment.make(tmp_path / name) for name in "ab"]
    environ = offline | {"PIP_CACHE_DIR": str(tmp_path / "cache")}
    del environ["PIP_NO_CACHE_DIR"]
    threads = [
        threading.Thread(target=environment.pip, args=("install", "--no-deps", listing), kwargs={"environ": environ})
        for environment in environments
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [environment.version("flash-attn") for environment in environments] == [STABLE, STABLE]


# --- a build that is killed ----------------------------------------------------------------------------------------


def test_killed_in_a_build(tree: Path, tmp_path: Path) -> None:
    """No wheel appears, and the next build goes on to the end."""
    hook = Hook(tree, tmp_path / "output", may_compile=True)
    hook.output.mkdir()
    environ = hook.environ | {"FORCE_BUILD": "1"}
    process = subprocess.Popen(
        hook.command(),
        cwd=tree,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not list(tree.glob("build/**/*.o")) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, 9)
    process.wait(10)
    assert list(hook.output.iterdir()) == []
    result = hook.run(FORCE_BUILD="1")
    assert result.returncode == 0, result.stderr
    assert [path.name for path in hook.output.iterdir()] == [result.stdout.splitlines()[-1]]
    shutil.rmtree(tree / "build")


# --- uv ------------------------------------------------------------------------------------------------------------


def uv(*arguments: str | Path, cwd: Path, environ: dict[str, str], fails: bool = False) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "uv", *map(str, arguments), "--no-cache"],
        cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", timeout=120,
        check=False,
    )  # fmt: skip
    assert (result.returncode != 0) == fails, result.stdout
    return result.stdout


def uv_environ(dist: Path, index: str) -> dict[str, str]:
    """uv with one index and no compiler."""
    variables = {"UV_DEFAULT_INDEX": index, "UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
    return clean_environ(FLASH_ATTN_WHEELS=str(dist), CXX="/none", **variables)


def make_project(folder: Path, *dependencies: str) -> Path:
    folder.mkdir()
    requires = ", ".join(f'"{name}"' for name in dependencies)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "user"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = [{requires}]\n'
    )
    return folder


NOT_ISOLATED = pytest.param(
    ("--no-build-isolation",),
    id="not isolated",
    marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomli in the environment, which is empty"),
)
ISOLATION = pytest.mark.parametrize("isolation", [pytest.param((), id="isolated"), NOT_ISOLATED])


@ISOLATION
def test_uv_sync_from_an_empty_environment(index: str, dist: Path, tmp_path: Path, isolation: tuple[str, ...]) -> None:
    """Case 11: `uv lock`, then `uv sync`, works the first time, with no second phase and no torch to begin with."""
    project, environ = make_project(tmp_path / "project", "flash-attn"), uv_environ(dist, index)
    uv("lock", *isolation, cwd=project, environ=environ)
    locked = (project / "uv.lock").read_text()
    assert f'name = "flash-attn"\nversion = "{VERSION}"' in locked
    assert not (project / ".venv").exists()
    uv("sync", *isolation, cwd=project, environ=environ)
    assert installed(Environment(project / ".venv")) == (STABLE, "2.13.0")
    assert (project / "uv.lock").read_text() == locked
    uv("sync", "--locked", *isolation, cwd=project, environ=environ)


@pytest.mark.slow
@ISOLATION
def test_uv_add(index: str, dist: Path, tmp_path: Path, isolation: tuple[str, ...]) -> None:
    project, environ = make_project(tmp_path / "project"), uv_environ(dist, index)
    uv("add", *isolation, "flash-attn", cwd=project, environ=environ)
    assert installed(Environment(project / ".venv")) == (STABLE, "2.13.0")
    assert f"flash-attn>={VERSION}" in (project / "pyproject.toml").read_text()


@pytest.mark.slow
@ISOLATION
def test_uv_pip_install(index: str, dist: Path, tmp_path: Path, isolation: tuple[str, ...]) -> None:
    environ = uv_environ(dist, index)
    uv("venv", "environment", cwd=tmp_path, environ=environ)
    environment = Environment(tmp_path / "environment")
    uv("pip", "install", *isolation, "--python", environment.python, "flash-attn", cwd=tmp_path, environ=environ)
    assert installed(environment) == (STABLE, "2.13.0")


@pytest.mark.slow
@ISOLATION
def test_uv_and_an_older_torch(index: str, dist: Path, tmp_path: Path, isolation: tuple[str, ...]) -> None:
    """Only without isolation does uv show the environment's torch to a build; `--no-deps` is needed to keep it."""
    environ = uv_environ(dist, index)
    uv("venv", "environment", cwd=tmp_path, environ=environ)
    environment = Environment(tmp_path / "environment")
    command = ("pip", "install", "--python", environment.python)
    uv(*command, "torch==2.6.0", cwd=tmp_path, environ=environ)
    uv(*command, *isolation, "--no-deps", "flash-attn", cwd=tmp_path, environ=environ)
    assert installed(environment) == (OF_2_6 if isolation else STABLE, "2.6.0")


@pytest.mark.slow
def test_uv_and_a_fault(index: str, dist: Path, tmp_path: Path) -> None:
    """Case 43, by uv: its message has ours, and nothing is installed."""

    def page(exchange) -> None:
        exchange.send("200 OK", b"<html>Please log in</html>", "Content-Type: text/html")

    project = make_project(tmp_path / "project", "flash-attn")
    with FaultServer(dist, page).running() as server:
        environ = uv_environ(dist, index) | {"FLASH_ATTN_WHEELS": server.url}
        log = uv("sync", cwd=project, environ=environ, fails=True)
    assert "it begins with 'Please log in'" in log
    assert installed(Environment(project / ".venv")) == (None, None)
