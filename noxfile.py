"""Everything that is done to the project, as nox sessions.

`nox -l` lists them and `nox -s NAME -- ARGUMENTS` runs one. These variables change where and with what they run:

FLASH_ATTN_TEST_TORCH    what pip is asked for where a torch is needed, e.g. "torch==2.13.0"; default "torch"
FLASH_ATTN_ENGINE        the container engine, docker or podman; default: the first that is there
FLASH_ATTN_BASE_IMAGE    the image that the build image is made from; default: the one in matrix.toml
FLASH_ATTN_ENGINE_ARGS   more arguments for the engine's `create`, e.g. "--network=host"
FLASH_ATTN_ENGINE_BUILD_ARGS   more arguments for the engine's `build`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))  # nox does not put the noxfile's folder there

from buildtools.compare import compare_wheels  # noqa: E402
from buildtools.index import serving  # noqa: E402
from buildtools.matrix import load_matrix  # noqa: E402
from buildtools.pins import pinned_images, with_pins  # noqa: E402

DIST = ROOT / "dist"
BUILD_LOCK = ROOT / "docker" / "requirements-build.txt"
NVRTC_LOCK = ROOT / "docker" / "requirements-nvrtc.txt"
TOOLS_LOCK = ROOT / "docker" / "requirements-tools.txt"
RELEASE_LOCK = ROOT / "docker" / "requirements-release.txt"
MATRIX = ROOT / "matrix.toml"
MAXIMUM_LINES = 800

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["lint", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


# -- what sessions share ---------------------------------------------------------------------------------------------


def install_locked(session: nox.Session, lock: Path) -> None:
    """Installs exactly what a lock file names, wheels only, each checked against its hash."""
    session.install("--require-hashes", "--only-binary=:all:", "--requirement", str(lock))


def test_torch() -> list[str]:
    """pip's arguments for the torch of the test environments."""
    return shlex.split(os.environ.get("FLASH_ATTN_TEST_TORCH", "torch"))


def the_wheel(session: nox.Session, folder: Path = DIST) -> Path:
    """The one wheel in a folder."""
    wheels = sorted(folder.glob("flash_attn-*.whl"))
    if len(wheels) != 1:
        session.error(f"{folder} holds {len(wheels)} flash_attn wheels, and one is needed: run `nox -s build-wheel`")
    return wheels[0]


def scratch(session: nox.Session, name: str) -> Path:
    """A path in the session's temporary folder at which there is nothing."""
    path = Path(session.create_tmp()).resolve() / name
    shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)
    return path


def fresh_environment(session: nox.Session, name: str) -> Path:
    """Makes an empty virtual environment and returns its Python."""
    folder = scratch(session, name)
    session.run("python", "-m", "virtualenv", "--quiet", str(folder))
    return folder / "bin" / "python"


def clean_environment() -> dict[str, str | None]:
    """Variables that would let the source tree or the user's site-packages into a test of an installed wheel."""
    return {"PYTHONPATH": None, "PYTHONNOUSERSITE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


def platform_of(session: nox.Session, matrix: dict[str, Any]) -> str:
    """The platform tag of the default wheel's host library."""
    return str(matrix["host_libraries"][matrix["wheels"]["default"]["host_library"]]["platform"])


# -- tests -----------------------------------------------------------------------------------------------------------


@nox.session
def tests(session: nox.Session) -> None:
    """Unit tests and the quick packaging tests; needs no GPU. Arguments go to pytest."""
    install_locked(session, TOOLS_LOCK)
    install_locked(session, BUILD_LOCK)
    session.install(*test_torch())
    # One process leaves a core idle, and a machine for CI has two. A file's tests stay together, for what they share.
    chosen = ["tests/packaging", "tests/unit", "-m", "not slow and not prove", "-n", "2", "--dist", "loadfile"]
    # Torch's threads would be as many in each process, and spin while they wait for one another's core.
    environment = {"OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", *chosen, "-rs", *session.posargs, env=environment)


@nox.session
def packaging(session: nox.Session) -> None:
    """The slow packaging tests: real pip, real environments, builds from source. Arguments go to pytest."""
    install_locked(session, TOOLS_LOCK)
    install_locked(session, BUILD_LOCK)  # with an NVRTC, for builds from source
    session.install(*test_torch())
    session.run("python", "-m", "pytest", "tests/packaging", "-m", "slow and not prove", *session.posargs)


@nox.session
def prove(session: nox.Session) -> None:
    """Every row's wheel, installed beside its real torch, used, and refused by others; arguments go to pytest.

    Downloads torch for each row, some 5 GB: `-- -k torch2.6` proves one row. The environments are temporary, unless
    FLASH_ATTN_PROVE_FOLDER names a folder for them; FLASH_ATTN_PROVE_HEAD_DIMS=64 leaves kernels out.
    """
    install_locked(session, TOOLS_LOCK)
    install_locked(session, BUILD_LOCK)
    session.install(*test_torch())
    session.run("python", "-m", "pytest", "tests/packaging/test_rows.py", "-m", "prove", *session.posargs)


@nox.session
def page(session: nox.Session) -> None:
    """The index's page for people in a headless Chromium, which has to be on PATH with chromedriver."""
    install_locked(session, TOOLS_LOCK)
    session.install("selenium")
    session.run("python", "-m", "pytest", "tests/browser", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """GPT-2 and LLaMA against transformers, and the Triton kernels in Triton's interpreter; needs no GPU."""
    install_locked(session, TOOLS_LOCK)
    session.install("transformers", "triton", *test_torch())
    session.run("python", "-m", "pytest", "tests/models", *session.posargs)


@nox.session(name="test-gpu")
def test_gpu(session: nox.Session) -> None:
    """Kernel tests against the wheel in dist/, never the source tree; needs a GPU. Arguments go to pytest.

    `-- --sample --cases 20000` runs the random cases by the thousands instead, on all cores; arguments go to sample.py.
    """
    install_locked(session, TOOLS_LOCK)
    install_the_wheel(session)
    tests = ROOT / "tests" / "kernels"
    if session.posargs[:1] == ["--sample"]:
        session.run("python", str(tests / "sample.py"), *session.posargs[1:], env=clean_environment())
        return
    session.run("pytest", str(tests), *session.posargs, env=clean_environment())


@nox.session
def sanitize(session: nox.Session) -> None:
    """Every kernel of the wheel in dist/ under compute-sanitizer; arguments go to tests/kernels/sanitize.py.

    `nox -s sanitize -- --tool racecheck --kernels '*-d64-*'`; memcheck, racecheck and synccheck without arguments. The
    tool is PyPI's: those of toolkits before CUDA 13.3 report hazards on Hopper that are none.
    """
    install_the_wheel(session)
    session.install("nvidia-cuda-sanitizer-api>=13.3")
    code = "import importlib.metadata as m; print(next(f.locate() for f in m.files('nvidia-cuda-sanitizer-api') "
    code += "if f.name == 'compute-sanitizer' and f.parent.name == 'compute-sanitizer'))"
    tool = str(session.run("python", "-c", code, silent=True)).strip()
    arguments = session.posargs or ["--tool", "memcheck", "--tool", "racecheck", "--tool", "synccheck"]
    script = str(ROOT / "tests" / "kernels" / "sanitize.py")
    session.run("python", script, "--sanitizer", tool, *arguments, env=clean_environment())


def install_the_wheel(session: nox.Session) -> None:
    """Installs torch and the wheel in dist/; away from the source tree, `import flash_attn` can only find the wheel."""
    wheel = the_wheel(session)
    session.install("numpy", *test_torch())
    session.install("--force-reinstall", "--no-deps", str(wheel))
    session.chdir(session.create_tmp())


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy, zizmor, actionlint, file lengths, and that generated files are up to date; types need a torch."""
    install_locked(session, TOOLS_LOCK)
    session.install(*test_torch())
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", "buildtools", "flash_attn", "flash_attn_interface.py", "noxfile.py")
    session.run("zizmor", "--offline", "--quiet", ".github/workflows")
    # Not locked: PyPI has it only as a download from elsewhere, or as forks that nobody here has vetted.
    if actionlint := shutil.which("actionlint"):
        session.run(actionlint, *map(str, sorted((ROOT / ".github" / "workflows").glob("*.yml"))), external=True)
    else:
        session.warn("actionlint is not installed: the workflows are checked by zizmor alone")
    session.run("python", "-m", "buildtools", "generate", "--check")
    check_lengths(session)
    check_locks(session)


def check_lengths(session: nox.Session) -> None:
    """Source files are short enough to be read from top to bottom."""
    suffixes = {".py", ".h", ".cuh", ".cu", ".cpp", ".toml", ".md", ".yml"}
    too_long = []
    for path in project_files(session):
        if path.suffix in suffixes and (lines := path.read_bytes().count(b"\n")) >= MAXIMUM_LINES:
            too_long.append(f"{path.relative_to(ROOT)}: {lines} lines")
    if too_long:
        session.error(f"files of {MAXIMUM_LINES} lines or more, split them: {', '.join(too_long)}")


def project_files(session: nox.Session) -> list[Path]:
    """What git tracks or would track."""
    listing = session.run(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", external=True, silent=True
    )
    return [path for name in str(listing).split("\0") if name and (path := ROOT / name).is_file()]


# -- the wheel -------------------------------------------------------------------------------------------------------


@nox.session(name="build-wheel")
def build_wheel(session: nox.Session) -> None:
    """Builds the wheel and its index into dist/, installs it from there and runs it; `-- --container`: in the image.

    The build environment is hash-locked, and the only thing taken from the machine is g++. With `--container` the
    wheel is built from the sdist by cibuildwheel inside the pinned image, put into dist/container/, and compared with
    the one in dist/ if there is one.
    """
    install_locked(session, BUILD_LOCK)
    container = "--container" in session.posargs
    if unknown := [argument for argument in session.posargs if argument != "--container"]:
        session.error(f"unknown arguments {unknown}; the only one is --container")
    folder = DIST / "container" if container else DIST
    folder.mkdir(parents=True, exist_ok=True)
    before = [path.read_bytes() for path in DIST.glob("flash_attn-*.tar.gz")]
    for old in [*folder.glob("flash_attn-*.whl"), *DIST.glob("flash_attn-*.tar.gz")]:
        old.unlink()

    session.run("python", "-m", "build", "--sdist", "--no-isolation", "--outdir", str(DIST), ".")
    (sdist,) = DIST.glob("flash_attn-*.tar.gz")
    if container:
        build_in_container(session, sdist, folder)
    else:
        session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), ".")
    wheel = the_wheel(session, folder)
    audit(session, wheel)

    index = folder / "index"
    session.run("python", "-m", "buildtools.index", "write", str(wheel), str(sdist), "--output", str(index))
    with serving(index) as url:
        install_and_run(session, f"{url}stable/", wheel)

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    session.log(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB, sha256 {digest}")
    if container and list(DIST.glob("flash_attn-*.whl")) and before != [sdist.read_bytes()]:
        session.warn("the wheel in dist/ is of other sources, so the two are not compared: run `nox -s build-wheel`")
    elif container and list(DIST.glob("flash_attn-*.whl")):
        # Another g++ writes another host library, and the bill names it and the image; all else has to be the same.
        names = ("libflash_attn.so", "build_info.json", "flash_attn.cdx.json", "RECORD")
        allowed = [f"--allow={name}" for name in names]
        session.run("python", "-m", "buildtools.compare", str(the_wheel(session)), str(wheel), *allowed)


def audit(session: nox.Session, wheel: Path) -> None:
    """The wheel's platform tag is true: auditwheel agrees with it and has nothing to add or to change."""
    matrix = nox.project.load_toml(MATRIX)
    platform = platform_of(session, matrix)
    repaired = scratch(session, "repaired")
    # Fails where a symbol is newer than the tag allows. libtorch belongs to the user's torch and is never bundled.
    command = ["auditwheel", "repair", "--plat", platform, "--only-plat", "--exclude", "libtorch*.so"]
    session.run(*command, "--wheel-dir", str(repaired), str(wheel))
    (result,) = repaired.glob("*.whl")
    changes = compare_wheels(wheel, result)
    changed = [name for name in (*changes.different, *changes.only_first, *changes.only_second) if name[-1] != "/"]
    if result.name != wheel.name or any(not name.endswith("/RECORD") for name in changed):
        session.error(f"auditwheel makes {result.name} of {wheel.name}, and changes {changed}: the tag is not true")


def install_and_run(session: nox.Session, url: str, wheel: Path) -> None:
    """Installs the wheel from the index at `url` as a user would, then runs a forward, a backward and doctor."""
    python = str(fresh_environment(session, "user"))
    environment = clean_environment()
    session.run(python, "-m", "pip", "install", *test_torch(), env=environment, external=True)
    report = scratch(session, "report.json")
    command = [python, "-m", "pip", "install", "--no-cache-dir", "--report", str(report), "flash-attn"]
    session.run(*command, "--index-url", url, env=environment, external=True)
    installed = {item["metadata"]["name"]: item["download_info"] for item in json.loads(report.read_text())["install"]}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if list(installed) != ["flash-attn"] or installed["flash-attn"]["archive_info"]["hashes"] != {"sha256": digest}:
        session.error(f"pip installed {installed}, and was to install {wheel.name} from {url} and nothing else")
    session.log(f"pip installed {installed['flash-attn']['url']} and nothing else")

    empty = scratch(session, "empty")
    empty.mkdir()
    session.chdir(empty)
    session.run(python, str(ROOT / "tests" / "packaging" / "first_use.py"), env=environment, external=True)
    session.run(python, "-m", "flash_attn", "doctor", env=environment, external=True)
    session.chdir(ROOT)


@nox.session
@nox.parametrize("row", [nox.param(name, id=name) for name in load_matrix(MATRIX).wheels])
def row(session: nox.Session, row: str) -> None:
    """The wheel of one row into dist/rows/: `nox -s "row(torch2.6-abi0)"`. A kernel set is compiled once for all."""
    install_locked(session, BUILD_LOCK)
    kernel_set = f"--kernel-set={load_matrix(MATRIX).wheels[row].kernel_set.name}"
    session.run("python", "-m", "buildtools", "compiler", kernel_set)
    session.run("python", "-m", "buildtools", "build", kernel_set)
    session.run("python", "-m", "buildtools", "headers", "--row", row)
    session.run("python", "-m", "buildtools", "wheel", "--row", row, "--out", str(DIST / "rows"))


@nox.session
def reproduce(session: nox.Session) -> None:
    """Builds wheels twice in different surroundings and compares; `-- --all`: every row that can be built here.

    `-- --row torch2.6-abi0` chooses rows, `-- --head-dims 64 --archs 90` a quick subset. diffoscope explains a
    difference where it is installed.
    """
    install_locked(session, BUILD_LOCK)
    session.run("python", "-m", "buildtools", "reproduce", *session.posargs)


@nox.session
def release(session: nox.Session) -> None:
    """`-- --dry-run`: a release of the default wheel to a local index server, and an install from there.

    Builds wheel, sdist, manifest and index as release.yml does, uploads them by twine to a pypiserver, compares what
    that lists with the manifest, and installs from it into a fresh environment.
    """
    if session.posargs != ["--dry-run"]:
        session.error(
            "releases are made by .github/workflows/release.yml, from a tag; here: nox -s release -- --dry-run"
        )
    install_locked(session, BUILD_LOCK)
    install_locked(session, RELEASE_LOCK)
    wheels, out, packages = (scratch(session, name) for name in ("wheels", "release", "packages"))
    packages.mkdir()
    command = ["python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), "."]
    session.run(*command, env={"FORCE_BUILD": "1"})
    wheel = the_wheel(session, wheels)
    audit(session, wheel)
    session.run("python", "-m", "buildtools", "release", "files", str(wheel), "--row=default", "--out", str(out))
    with index_server(session, packages) as url:
        account = ["--repository-url", url, "--username=any", "--password=any", "--non-interactive"]
        files = sorted(map(str, (out / "files").iterdir()))
        session.run("twine", "upload", *account, "--disable-progress-bar", *files)
        with urllib.request.urlopen(f"{url}simple/flash-attn/") as page:
            listed = re.findall(r"<a [^>]*>([^<]+)</a>", page.read().decode())
        listing = scratch(session, "listing.txt")
        listing.write_text("\n".join(listed) + "\n")
        session.run("python", "-m", "buildtools", "release", "compare", str(out), "--listing", str(listing))
        install_and_run(session, f"{url}simple/", wheel)


@contextlib.contextmanager
def index_server(session: nox.Session, packages: Path) -> Iterator[str]:
    """A pypiserver on loopback that takes uploads from anybody, and its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = str(Path(session.bin) / "python")
    command = [python, "-m", "pypiserver", "run", "--interface=127.0.0.1", f"--port={port}", "--disable-fallback"]
    server = subprocess.Popen([*command, "--passwords=.", "--authenticate=.", str(packages)])
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url).close()
                break
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


# -- the container ---------------------------------------------------------------------------------------------------


def engine(session: nox.Session) -> str:
    """docker or podman."""
    found = os.environ.get("FLASH_ATTN_ENGINE") or next(filter(shutil.which, ("docker", "podman")), None)
    if found not in ("docker", "podman"):
        session.error(f"FLASH_ATTN_ENGINE is {found!r}: docker or podman is needed, and cibuildwheel knows no other")
    return found


def build_image(session: nox.Session, base: str, python: str) -> str:
    """Makes the build image, unless it is there; its tag is a hash of everything that goes into it."""
    context = ROOT / "docker"
    inputs = [base, python, (context / "Dockerfile").read_text(), BUILD_LOCK.read_text()]
    tag = f"flash-attn-build:{hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]}"
    name = engine(session)
    if subprocess.run([name, "image", "inspect", tag], capture_output=True, check=False).returncode != 0:
        more = shlex.split(os.environ.get("FLASH_ATTN_ENGINE_BUILD_ARGS", ""))
        arguments = [f"--build-arg=BASE_IMAGE={base}", f"--build-arg=PYTHON={python}", f"--tag={tag}"]
        arguments += ["--target=environment"]
        session.run(name, "build", *arguments, *more, str(context), external=True)
    return tag


def build_in_container(session: nox.Session, sdist: Path, folder: Path) -> None:
    """Builds the wheel of an sdist by cibuildwheel, inside the build image, into `folder`."""
    matrix = nox.project.load_toml(MATRIX)
    platform = platform_of(session, matrix)
    pins = matrix["images"][platform]
    base = os.environ.get("FLASH_ATTN_BASE_IMAGE") or pins["image"]
    image = build_image(session, base, pins["python"])
    create = " ".join(["--env=SOURCE_DATE_EPOCH", os.environ.get("FLASH_ATTN_ENGINE_ARGS", "")]).strip()
    tag, machine = pins["python"].split("-")[0], platform.split("_", 3)[3]
    passed = ("FLASH_ATTN_HEAD_DIMS", "FLASH_ATTN_KERNELS", "FLASH_ATTN_CUDA_ARCHS", "MAX_JOBS")
    environment = {
        "CIBW_BUILD": f"{tag}-manylinux_{machine}",
        "CIBW_CONTAINER_ENGINE": f"{engine(session)}; disable_host_mount: true; create_args: {create}",
        f"CIBW_MANYLINUX_{machine.upper()}_IMAGE": image,
        "CIBW_BUILD_FRONTEND": "build; args: --no-isolation",
        # Never the published wheel of an sdist that lists one. The image is for the wheel's bill of materials.
        "CIBW_ENVIRONMENT": f"FORCE_BUILD=1 FLASH_ATTN_IMAGE={base}",
        "CIBW_ENVIRONMENT_PASS_LINUX": " ".join(passed),
        # The wheel is not to be changed: the same check as outside follows.
        "CIBW_REPAIR_WHEEL_COMMAND": "cp {wheel} {dest_dir}",
    }
    tools = fresh_environment(session, "cibuildwheel")
    lock = ["--require-hashes", "--only-binary=:all:", "--requirement", str(TOOLS_LOCK)]
    session.run(str(tools), "-m", "pip", "install", "--quiet", *lock, external=True)
    command = [str(tools), "-m", "cibuildwheel", "--platform", "linux", "--output-dir", str(folder), str(sdist)]
    session.run(*command, env=environment, external=True)


# -- figures and pins ------------------------------------------------------------------------------------------------


@nox.session
def bench(session: nox.Session) -> None:
    """The wheel in dist/ beside torch's backends and the bars, on this machine's GPU; arguments go to the benchmark.

    Writes dist/benchmark.json, and the page and the chart made from it: `nox -s bench -- --only 'fwd-d128-*'`.
    """
    install_the_wheel(session)
    benchmarks, result = ROOT / "benchmarks", DIST / "benchmark.json"
    script, report = str(benchmarks / "benchmark.py"), str(benchmarks / "report.py")
    session.run("python", script, "--json", str(result), *session.posargs, env=clean_environment())
    pages = ["--markdown", str(DIST / "benchmark.md"), "--chart", str(DIST / "benchmark.svg")]
    session.run("python", report, str(result), *pages)


@nox.session(name="bench-build")
def bench_build(session: nox.Session) -> None:
    """CPU-seconds, peak memory, wheel size and rebuild time of the build. Arguments go to the benchmark."""
    install_locked(session, BUILD_LOCK)
    session.run("python", "benchmarks/build_time.py", *session.posargs)


@nox.session(name="update-pins")
def update_pins(session: nox.Session) -> None:
    """Every pin anew: NVRTC's version, the lock files, the images' digests, and what is generated; needs PyPI alone.

    NVRTC stays within its CUDA major. The digests are those that the newest cibuildwheel pins.
    """
    install_locked(session, TOOLS_LOCK)
    compiler = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--upgrade"]
    versions = {}
    for name, kernel_set in nox.project.load_toml(MATRIX)["kernel_sets"].items():
        source, result = scratch(session, f"{name}.in"), scratch(session, f"{name}.txt")
        following = int(kernel_set["version"].split(".")[0]) + 1
        source.write_text(f"{kernel_set['requirement']}>={kernel_set['version']},<{following}\n")
        session.run(*compiler, f"--output-file={result}", str(source))
        versions[name] = result.read_text().strip().partition("==")[2]
    MATRIX.write_text(with_pins(MATRIX.read_text(), versions, {}))
    for lock, requirements in lock_inputs().items():
        source = scratch(session, f"{lock.stem}.in")
        source.write_text("\n".join(requirements) + "\n")
        command = [*compiler, "--universal", "--python-version=3.10", "--generate-hashes", f"--output-file={lock}"]
        if lock != BUILD_LOCK:  # one environment may hold both
            command += [f"--constraint={BUILD_LOCK}"]
        session.run(*command, str(source))
        lock.write_text(lock_header(requirements) + lock.read_text())
    install_locked(session, TOOLS_LOCK)
    code = "import cibuildwheel; print(cibuildwheel.__file__)"
    package = Path(str(session.run("python", "-c", code, silent=True)).strip()).parent
    images = pinned_images(load_matrix(MATRIX), (package / "resources" / "pinned_docker_images.cfg").read_text())
    MATRIX.write_text(with_pins(MATRIX.read_text(), {}, images))
    session.run("python", "-m", "buildtools", "generate")


def lock_inputs() -> dict[Path, list[str]]:
    """What each lock file has to hold: its path -> requirements."""
    matrix, project = nox.project.load_toml(MATRIX), nox.project.load_toml(ROOT / "pyproject.toml")
    kernel_set = matrix["kernel_sets"][matrix["wheels"]["default"]["kernel_set"]]
    nvrtc = f"{kernel_set['requirement']}=={kernel_set['version']}"
    build = [*project["build-system"]["requires"], nvrtc, matrix["tools"]["ninja"], *matrix["requirements"]["build"]]
    others = {TOOLS_LOCK: "tools", RELEASE_LOCK: "release"}
    return {
        BUILD_LOCK: sorted(set(build)),
        NVRTC_LOCK: sorted(f"{item['requirement']}=={item['version']}" for item in matrix["kernel_sets"].values()),
        **{lock: sorted(matrix["requirements"][key]) for lock, key in others.items()},
    }


def lock_header(requirements: list[str]) -> str:
    """The first lines of a lock file, by which `lint` sees that what it was made from has changed."""
    lines = ["# Written by `nox -s update-pins`, from matrix.toml and pyproject.toml, for:"]
    return "\n".join([*lines, *(f"#     {requirement}" for requirement in requirements)]) + "\n"


def check_locks(session: nox.Session) -> None:
    """The lock files were made for the requirements that the tables name now."""
    for lock, requirements in lock_inputs().items():
        if not lock.read_text().startswith(lock_header(requirements)):
            session.error(f"{lock.relative_to(ROOT)} is not for {requirements}: run `nox -s update-pins`")
