"""Names of GPU architectures, and the variables that choose them.

An arch is written "80", "90a" or "ptx80" in the tables, in the archive and in messages. `parse_archs` reads what a
user may write in FLASH_ATTN_CUDA_ARCHS or TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .errors import ArchError

ACCEPTED_FORMS = "`80;90`, `8.0,9.0a`, `90a`, `9.0+PTX`, `ptx80`, `native` (the GPUs of this machine) or `all`"

# What PyTorch's TORCH_CUDA_ARCH_LIST calls them.
_GENERATIONS = {
    "kepler": "3.5 3.7",
    "maxwell": "5.0 5.2",
    "pascal": "6.0 6.1",
    "volta": "7.0",
    "turing": "7.5",
    "ampere": "8.0 8.6",
    "ada": "8.9",
    "hopper": "9.0",
    "blackwell": "10.0 12.0",
}


@dataclass(frozen=True, order=True)
class Arch:
    """One target: `number` is 10 * major + minor, `suffix` "a" for arch-specific code; PTX instead of SASS if `ptx`."""

    number: int
    suffix: str = ""
    ptx: bool = False

    def __str__(self) -> str:
        return f"ptx{self.number}" if self.ptx else f"{self.number}{self.suffix}"

    def runs(self, other: Arch) -> bool:
        """Whether a GPU of this arch runs the machine code of the other one, an earlier one of its generation."""
        plain = not (self.ptx or self.suffix or other.ptx or other.suffix)
        return plain and self.number // 10 == other.number // 10 and other.number < self.number

    @property
    def gpu_architecture(self) -> str:
        """The value of NVRTC's --gpu-architecture."""
        return f"{'compute' if self.ptx else 'sm'}_{self.number}{self.suffix}"


_NAME = re.compile(r"(?P<ptx>ptx|compute_)?(?:sm_?)?(?P<number>[0-9]{2,3})(?P<suffix>a?)", re.IGNORECASE)
_DOTTED = re.compile(r"(?P<major>[0-9]{1,2})\.(?P<minor>[0-9])(?P<suffix>a?)", re.IGNORECASE)


def parse_arch(text: str) -> Arch:
    """The inverse of `str(arch)`; also reads `9.0a`, `sm_90a` and `compute_80`."""
    dotted = _DOTTED.fullmatch(text)
    if dotted:
        return Arch(int(dotted["major"]) * 10 + int(dotted["minor"]), dotted["suffix"].lower())
    name = _NAME.fullmatch(text)
    if name and not (name["ptx"] and name["suffix"]):
        return Arch(int(name["number"]), name["suffix"].lower(), bool(name["ptx"]))
    raise ArchError(f'"{text}" names no GPU architecture', fix=f"accepted forms are {ACCEPTED_FORMS}")


def format_archs(archs: Iterable[Arch]) -> str:
    """What `parse_archs` reads back as the same list."""
    return ";".join(str(arch) for arch in archs)


def parse_archs(text: str, *, variable: str, all_archs: Iterable[Arch], native: Callable[[], list[Arch]]) -> list[Arch]:
    """The archs that `text` names, each once, in the order written.

    `all_archs` is what `all` stands for; `native` returns the archs of this machine's GPUs, and raises ArchError if
    there are none.
    """
    result: list[Arch] = []
    words = [word for word in re.split(r"[\s;,]+", text.strip()) if word]
    if not words:
        raise ArchError(f"{variable}={text!r} names no GPU architecture", fix=f"accepted forms are {ACCEPTED_FORMS}")
    for word in words:
        base, plus, extra = word.partition("+")
        if plus and extra.lower() != "ptx":
            raise ArchError(
                f"{variable}={text!r}: +{extra} is not understood in {word!r}",
                fix=f"accepted forms are {ACCEPTED_FORMS}",
            )
        lower = base.lower()
        if lower == "all":
            named = list(all_archs)
        elif lower == "native":
            named = native()
        elif lower in _GENERATIONS:
            named = [parse_arch(number) for number in _GENERATIONS[lower].split()]
        else:
            try:
                named = [parse_arch(base)]
            except ArchError as error:
                raise ArchError(f"{variable}={text!r}: {error.what}", fix=error.fix) from None
        result += named
        if plus:
            result.append(Arch(max(arch.number for arch in named), ptx=True))
    return list(dict.fromkeys(result))


def native_archs() -> list[Arch]:
    """The archs of the GPUs that the driver of this machine sees."""
    import ctypes

    why = "`native` means the GPUs of this machine"
    fix = f"name the archs instead: {ACCEPTED_FORMS}"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ArchError(f"no NVIDIA driver: {error}", why=why, fix=fix) from None
    status = driver.cuInit(0)
    count = ctypes.c_int()
    if status == 0:
        status = driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        raise ArchError(f"the NVIDIA driver sees no GPU (CUDA error {status})", why=why, fix=fix)
    found = set()
    for device in range(count.value):
        capability = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
            capability.append(value.value)
        found.add(Arch(capability[0] * 10 + capability[1]))
    return sorted(found)
