"""Which published wheel is right for an environment, and for each other one why it is not.

`choose` is pure: facts about the environment and the published wheels go in, the decision comes out. Reading the facts
is in facts.py, the list of wheels in manifest.py, downloading in fetch.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .archs import Arch, parse_arch
from .errors import ArchError, FactError, ManifestError, nearest

# The major version of torch that the wheels' ABIs were made for. Another one may change anything.
TORCH_MAJOR = 2
# The first driver of each CUDA major. It loads machine code of every compiler of its major ("minor version
# compatibility") and of earlier ones, and refuses that of a later major.
FIRST_DRIVERS = {12: "525.60.13", 13: "580.65.06"}
# Local version labels of torch's own releases. Any other one is of a build whose ABI nobody knows.
_RELEASE_LABELS = re.compile(r"(cpu|cu\d+|rocm\d+|xpu)(\..*|_full)?")
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)"
    r"(?P<pre>[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview|dev)[-_.]?\d*)?(?P<post>[-_.]?post[-_.]?\d+)?"
    r"(?P<dev>[-_.]?dev[-_.]?\d*)?(?:\+(?P<local>[a-z0-9]+(?:[-_.][a-z0-9]+)*))?",
    re.IGNORECASE,
)
_PLATFORM = re.compile(r"(?P<libc>manylinux|musllinux)_(?P<major>\d+)_(?P<minor>\d+)_(?P<machine>\w+)")
_VARIANT = re.compile(
    r"torch(?P<torch>\d+\.\d+\+?)-(?P<abi>stable|cxx11abi[01])-nvrtc(?P<compiler>\d+(?:\.\d+)+)"
    r"-(?P<archs>(?:ptx)?\d+a?(?:\.(?:ptx)?\d+a?)*)-(?P<platform>\w+)-py(?P<python>\d+\.\d+)"
)


@dataclass(frozen=True)
class Facts:
    """What is known of the environment that is installed into. None: not known, or not there.

    `torch` is the version as torch says it, `cxx11_abi` its _GLIBCXX_USE_CXX11_ABI; `cuda` the newest CUDA version that
    the driver serves; `gpus` the compute capabilities of the GPUs as 10 * major + minor.
    """

    system: str  # sys.platform
    machine: str
    python: tuple[int, int]
    libc: tuple[str, int, int] | None = None  # ("glibc", 2, 36) or ("musl", 1, 2)
    torch: str | None = None
    cxx11_abi: bool | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[int, ...] = ()

    def __str__(self) -> str:
        """The key that is looked for, such as torch2.6.0-cxx11abi0-linux_x86_64-glibc2.36-py3.11-cuda12.8-gpu90."""
        parts = [f"torch{self.torch or '?'}"]
        if self.cxx11_abi is not None:
            parts.append(f"cxx11abi{int(self.cxx11_abi)}")
        parts.append(f"{self.system}_{self.machine}")
        if self.libc:
            parts.append("{}{}.{}".format(*self.libc))
        parts.append("py{}.{}".format(*self.python))
        if self.cuda:
            parts.append("cuda{}.{}".format(*self.cuda))
        if self.gpus:
            parts.append(f"gpu{'.'.join(map(str, self.gpus))}")
        return "-".join(parts)


@dataclass(frozen=True)
class Variant:
    """What a wheel is for. `parse` and `str` are inverses.

    `torch` is (major, minor): the oldest one of the stable ABI, or the only one if `cxx11_abi` is not None; `compiler`
    the version of the NVRTC that made the kernels.
    """

    torch: tuple[int, int]
    cxx11_abi: bool | None
    compiler: tuple[int, ...]
    archs: tuple[Arch, ...]
    platform: str
    python: tuple[int, int]  # the oldest

    @classmethod
    def parse(cls, text: str) -> Variant:
        found = _VARIANT.fullmatch(text)
        if not found or (found["abi"] == "stable") != found["torch"].endswith("+"):
            raise ManifestError(
                f'"{text}" is no variant of a wheel',
                fix='it is written like "torch2.6-cxx11abi0-nvrtc12.9.86-80.90a.ptx80-manylinux_2_28_x86_64-py3.10", '
                'or begins with "torch2.10+-stable"',
            )
        return cls(
            torch=_pair(found["torch"].rstrip("+")),
            cxx11_abi=None if found["abi"] == "stable" else found["abi"][-1] == "1",
            compiler=tuple(map(int, found["compiler"].split("."))),
            archs=tuple(map(parse_arch, found["archs"].split("."))),
            platform=found["platform"],
            python=_pair(found["python"]),
        )

    def __str__(self) -> str:
        torch = f"torch{_dotted(self.torch)}{'+' if self.cxx11_abi is None else ''}"
        abi = "stable" if self.cxx11_abi is None else f"cxx11abi{int(self.cxx11_abi)}"
        compiler, archs = _dotted(self.compiler), ".".join(map(str, self.archs))
        return f"{torch}-{abi}-nvrtc{compiler}-{archs}-{self.platform}-py{_dotted(self.python)}"

    @property
    def requirement(self) -> str:
        """Of torch, as the wheel's METADATA has it."""
        return f"torch>={_dotted(self.torch)}" if self.cxx11_abi is None else f"torch=={_dotted(self.torch)}.*"


@dataclass(frozen=True)
class PublishedWheel:
    """A file of the manifest. `size` in bytes."""

    filename: str
    sha256: str
    size: int
    variant: Variant

    @property
    def version(self) -> str:
        """With its local label, as the file name has it."""
        return self.filename.split("-")[1]

    @property
    def kind(self) -> str:
        """The name of the index that the wheel is on: its local version label, or `stable`."""
        return self.version.partition("+")[2] or "stable"


@dataclass(frozen=True)
class Rejection:
    wheel: PublishedWheel
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """`wheel` is None where none fits. `rejected` has the nearest first, each with every reason against it."""

    facts: Facts
    wheel: PublishedWheel | None
    rejected: tuple[Rejection, ...]

    def text(self, limit: int = 3) -> str:
        """The trace: the key, the wheel, and the nearest others with the reasons against them."""
        lines = [f"looked for a wheel for {self.facts}"]
        if self.wheel:
            lines.append(f"  found {self.wheel.filename}")
        else:
            lines.append(f"  none of the {len(self.rejected)} published wheels fits")
        for rejection in self.rejected[:limit]:
            lines.append(f"  not {rejection.wheel.filename}: {'; '.join(rejection.reasons)}")
        if len(self.rejected) > limit:
            lines.append(f"  and {len(self.rejected) - limit} more, further off")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        facts = {**vars(self.facts), "key": str(self.facts)}
        return {
            "facts": facts,
            "wheel": None if self.wheel is None else describe(self.wheel),
            "rejected": [{**describe(r.wheel), "reasons": list(r.reasons)} for r in self.rejected],
        }


def describe(wheel: PublishedWheel) -> dict[str, Any]:
    """One wheel as JSON has it."""
    return {
        "filename": wheel.filename,
        "sha256": wheel.sha256,
        "size": wheel.size,
        "variant": str(wheel.variant),
        "requires": wheel.variant.requirement,
    }


def choose(facts: Facts, wheels: Sequence[PublishedWheel]) -> Decision:
    """The best of the wheels that fit, or none. The order of `wheels` does not matter."""
    judged = [(wheel, reasons_against(facts, wheel)) for wheel in wheels]
    fitting = sorted((wheel for wheel, reasons in judged if not reasons), key=lambda wheel: _preference(facts, wheel))
    rejected = [Rejection(wheel, tuple(reasons)) for wheel, reasons in judged if reasons]
    best = fitting[0] if fitting else None
    for other in fitting[1:]:
        assert best is not None
        rejected.append(Rejection(other, (f"it fits, and {best.filename} {_better(facts, best, other)}",)))
    rejected.sort(key=lambda rejection: _distance(facts, rejection))
    return Decision(facts, best, tuple(rejected))


def reasons_against(facts: Facts, wheel: PublishedWheel) -> list[str]:
    """Every reason why `wheel` is not for this environment; none if it is."""
    variant = wheel.variant
    return [
        *_against_platform(facts, variant.platform),
        *_against_python(facts, variant.python),
        *_against_torch(facts, variant),
        *_against_kernels(facts, variant),
    ]


def _against_platform(facts: Facts, platform: str) -> list[str]:
    found = _PLATFORM.fullmatch(platform)
    if found is None:
        return [] if platform == f"{facts.system}_{facts.machine}" else [f"it is for {platform}"]
    if facts.system != "linux":
        return [f"it is for Linux, this is {facts.system}"]
    reasons = []
    if facts.machine != found["machine"]:
        reasons.append(f"it is for {found['machine']}, this machine is {facts.machine}")
    libc = "glibc" if found["libc"] == "manylinux" else "musl"
    needed = (int(found["major"]), int(found["minor"]))
    if facts.libc is None:
        reasons.append(f"it needs {libc} {_dotted(needed)}, and the C library is unknown")
    elif facts.libc[0] != libc or facts.libc[1:] < needed:
        name, *version = facts.libc
        reasons.append(f"it needs {libc} {_dotted(needed)} or newer, found {name} {_dotted(version)}")
    return reasons


def _against_python(facts: Facts, oldest: tuple[int, int]) -> list[str]:
    if facts.python >= oldest:
        return []
    return [f"it needs Python {_dotted(oldest)} or newer, found {_dotted(facts.python)}"]


def _against_torch(facts: Facts, variant: Variant) -> list[str]:
    wanted = _dotted(variant.torch)
    if facts.torch is None:
        # The stable wheel's own requirement keeps torch right; for one of the others nothing would say which.
        return [] if variant.cxx11_abi is None else [f"it is for torch {wanted} alone, and no torch was found"]
    version = TorchVersion.parse(facts.torch)
    if version is None:
        return [f"torch's version {facts.torch!r} cannot be read"]
    major = version.release[0]
    if major > max(TORCH_MAJOR, variant.torch[0]):
        return [f"torch {major} is newer than what it was made for (torch {variant.torch[0]})"]
    if variant.cxx11_abi is None:
        too_old = version.release < variant.torch or (version.pre and version.release[:3] in _zeros(variant.torch))
        return [f"it needs torch {wanted} or newer, found {facts.torch}"] if too_old else []
    if version.release[:2] != variant.torch:
        return [f"it is for torch {wanted} alone, found {facts.torch}"]
    if not version.is_release:
        return [f"it is for releases of torch {wanted}, and {facts.torch} is none: its ABI may be another"]
    if facts.cxx11_abi is None:
        return ["the C++ ABI of this torch is unknown (FORCE_CXX11_ABI says it)"]
    if facts.cxx11_abi != variant.cxx11_abi:
        return [f"it is for _GLIBCXX_USE_CXX11_ABI={int(variant.cxx11_abi)}, this torch has {int(facts.cxx11_abi)}"]
    return []


def _against_kernels(facts: Facts, variant: Variant) -> list[str]:
    major = variant.compiler[0]
    first = FIRST_DRIVERS.get(major)
    needed = f"its kernels need a driver for CUDA {major} or newer" + (f" ({first} or newer)" if first else "")
    if facts.cuda is not None and facts.cuda[0] < major:
        driver = f"driver {facts.driver}" if facts.driver else "the driver"
        return [f"{needed}, {driver} serves CUDA {_dotted(facts.cuda)}"]
    if facts.cuda is None and facts.driver and first and _numbers(facts.driver) < _numbers(first):
        return [f"{needed}, found driver {facts.driver}"]
    if facts.gpus and not any(_native(gpu, variant) or _by_ptx(gpu, facts, variant) for gpu in facts.gpus):
        found = ", ".join(f"{gpu // 10}.{gpu % 10}" for gpu in facts.gpus)
        return [f"it has no kernel for compute capability {found} (it has {' '.join(map(str, variant.archs))})"]
    return []


def _native(gpu: int, variant: Variant) -> bool:
    """Machine code for `gpu`: of the same major and no newer minor; arch-specific code for that very arch alone."""
    return any(
        not arch.ptx and arch.number // 10 == gpu // 10 and (arch.number == gpu if arch.suffix else arch.number <= gpu)
        for arch in variant.archs
    )


def _by_ptx(gpu: int, facts: Facts, variant: Variant) -> bool:
    """PTX that the driver can compile for `gpu`: it has to know the PTX of the compiler's very version."""
    return any(arch.ptx and arch.number <= gpu for arch in variant.archs) and (
        facts.cuda is None or facts.cuda >= variant.compiler[:2]
    )


def _preference(facts: Facts, wheel: PublishedWheel) -> tuple[Any, ...]:
    """Smallest first: most GPUs with machine code of their own, then the compiler that asks least of the driver."""
    return (-sum(_native(gpu, wheel.variant) for gpu in facts.gpus), wheel.variant.compiler, wheel.filename)


def _better(facts: Facts, best: PublishedWheel, other: PublishedWheel) -> str:
    if _preference(facts, best)[0] != _preference(facts, other)[0]:
        return "has machine code for more of the GPUs"
    if best.variant.compiler != other.variant.compiler:
        return f"serves older drivers too (CUDA {best.variant.compiler[0]})"
    return "comes first by its name"


def _distance(facts: Facts, rejection: Rejection) -> tuple[Any, ...]:
    """Smallest for the nearest: fewest reasons, then the torch that is least far off."""
    variant = rejection.wheel.variant
    version = TorchVersion.parse(facts.torch or "")
    release = (*version.release, 0)[:2] if version else variant.torch
    off = (abs(release[0] - variant.torch[0]), abs(release[1] - variant.torch[1]))
    return (len(rejection.reasons), off, rejection.wheel.filename)


@dataclass(frozen=True)
class TorchVersion:
    """A version of torch as far as a choice needs it."""

    release: tuple[int, ...]
    pre: bool
    local: str

    @classmethod
    def parse(cls, text: str) -> TorchVersion | None:
        found = _VERSION.fullmatch(text.strip())
        if not found:
            return None
        release = tuple(map(int, found["release"].split(".")))
        return cls(release, bool(found["pre"] or found["dev"]), (found["local"] or "").lower())

    @property
    def is_release(self) -> bool:
        """One of torch's own releases, rather than a pre-release or a build from git."""
        return not self.pre and (not self.local or bool(_RELEASE_LABELS.fullmatch(self.local)))


def _zeros(minor: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    """The releases that a pre-release of `minor` comes before."""
    return (minor, (*minor, 0))


# --- facts of another machine, written by a person ---------------------------------------------------------------

_KEYS = "torch, abi, platform, python, driver, gpu"


def parse_facts(text: str, here: Facts) -> Facts:
    """`torch=2.6,abi=0,platform=manylinux_2_28_x86_64,python=3.12,driver=12.8,gpu=90` as facts.

    What is not said of another machine is not known, except Python and the platform: they are taken from `here`.
    `driver` is the CUDA version that the driver serves; several GPUs are separated by `+`.
    """
    facts = replace(here, torch=None, cxx11_abi=None, driver=None, cuda=None, gpus=())
    for item in filter(None, re.split(r"[\s,;]+", text)):
        key, _, value = item.partition("=")
        if not value:
            raise FactError(
                f'"{item}" in --for {text} says nothing', fix=f"write KEY=VALUE, where KEY is one of {_KEYS}"
            )
        try:
            facts = _with_fact(facts, key, value)
        except (ValueError, KeyError, ArchError):
            raise FactError(f"--for {text}: {key}={value} is not understood", fix=_FORMS.get(key, "")) from None
    if facts.torch and facts.cxx11_abi is None:
        facts = replace(facts, cxx11_abi=known_cxx11_abi(facts.torch))
    return facts


_FORMS = {
    "torch": "such as torch=2.6 or torch=2.13.0+cu130",
    "abi": "abi=0 or abi=1: _GLIBCXX_USE_CXX11_ABI, torch._C._GLIBCXX_USE_CXX11_ABI in Python",
    "platform": "such as platform=manylinux_2_28_x86_64 (glibc 2.28), win_amd64 or macosx_14_0_arm64",
    "python": "such as python=3.12",
    "driver": "the CUDA version that `nvidia-smi` shows, such as driver=12.8",
    "gpu": "the compute capability, such as gpu=90 or gpu=8.0+9.0",
}


def _with_fact(facts: Facts, key: str, value: str) -> Facts:
    if key == "torch":
        if not TorchVersion.parse(value):
            raise ValueError(value)
        return replace(facts, torch=value)
    if key == "abi":
        return replace(facts, cxx11_abi={"0": False, "1": True}[value])
    if key == "platform":
        return _with_platform(facts, value)
    if key == "python":
        return replace(facts, python=_pair(value))
    if key == "driver":
        return replace(facts, cuda=_pair(value))
    if key == "gpu":
        return replace(facts, gpus=tuple(sorted({parse_arch(gpu).number for gpu in value.split("+")})))
    raise FactError(f"--for does not know {key}={value}", fix=f"{nearest(key, _KEYS.split(', '))}the keys are {_KEYS}")


def _with_platform(facts: Facts, tag: str) -> Facts:
    """A platform as wheel tags name it; what they promise at least is what the machine has."""
    linux = _PLATFORM.fullmatch(tag)
    if linux:
        libc = "glibc" if linux["libc"] == "manylinux" else "musl"
        version = (libc, int(linux["major"]), int(linux["minor"]))
        return replace(facts, system="linux", machine=linux["machine"], libc=version)
    for pattern, system in (
        (r"win_(\w+)|win(32)", "win32"), (r"macosx_\d+_\d+_(\w+)", "darwin"), (r"linux_(\w+)", "linux")
    ):  # fmt: skip
        found = re.fullmatch(pattern, tag)
        if found:
            libc_here = facts.libc if system == facts.system == "linux" else None
            return replace(facts, system=system, machine=next(filter(None, found.groups())), libc=libc_here)
    raise ValueError(tag)


def known_cxx11_abi(torch: str) -> bool | None:
    """_GLIBCXX_USE_CXX11_ABI of torch's own releases; None for another build.

    1 from 2.7 on, and before that in the builds for CUDA 12.6 of torch 2.6 and in those that say so.
    """
    version = TorchVersion.parse(torch)
    if version is None or not version.is_release:
        return None
    if version.release[:2] == (2, 6) and version.local == "cu126":
        return True
    return version.release >= (2, 7) or "cxx11" in version.local


def _pair(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _dotted(numbers: Sequence[Any]) -> str:
    return ".".join(map(str, numbers))
