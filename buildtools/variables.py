"""Every environment variable that the build reads, parsed in this one place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import VariableError, nearest

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

# Name -> the name that upstream FlashAttention gave it.
_ALIASES = {
    "FORCE_BUILD": "FLASH_ATTENTION_FORCE_BUILD",
    "SKIP_CUDA_BUILD": "FLASH_ATTENTION_SKIP_CUDA_BUILD",
    "FORCE_CXX11_ABI": "FLASH_ATTENTION_FORCE_CXX11_ABI",
}

# The variables of this project that begin with FLASH_ATTN_, those of the installed package too: another one is
# probably misspelt.
KNOWN = (
    "FLASH_ATTN_CUDA_ARCHS",
    "FLASH_ATTN_KERNELS",
    "FLASH_ATTN_HEAD_DIMS",
    "FLASH_ATTN_NVRTC",
    "FLASH_ATTN_TORCH",
    "FLASH_ATTN_WHEELS",
    "FLASH_ATTN_LOCAL_VERSION",
    "FLASH_ATTN_NO_BUILD",
    "FLASH_ATTN_BUILD_DIR",
    "FLASH_ATTN_JIT",
    "FLASH_ATTN_CACHE_DIR",
    "FLASH_ATTN_FAMILY",
)

# Beginnings of those that the noxfile, the tests and the build's own steps read.
_OF_OTHER_TOOLS = (
    "FLASH_ATTN_TEST_",
    "FLASH_ATTN_ENGINE",
    "FLASH_ATTN_BASE_IMAGE",
    "FLASH_ATTN_IMAGE",
    "FLASH_ATTN_EDGE_",
    "FLASH_ATTN_PROVE_",
)


@dataclass(frozen=True)
class Variables:
    """What the environment asks for. None: not set."""

    force_build: bool = False
    skip_cuda_build: bool = False
    force_cxx11_abi: bool | None = None
    no_build: bool = False
    cuda_archs: str | None = None
    cuda_archs_from: str = ""  # the variable that `cuda_archs` was read from
    kernels: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_jobs: int | None = None
    nvrtc: str | None = None
    wheels: str | None = None
    local_version: str | None = None
    build_dir: str | None = None
    cxx: str | None = None
    notes: tuple[str, ...] = field(default=())  # what to tell the user before building


def read_variables(environ: Mapping[str, str]) -> Variables:
    """`environ` parsed; VariableError names the variable, its value and what is accepted. Empty means not set."""
    notes = []
    for name in sorted(environ):
        if name.startswith("FLASH_ATTN_") and name not in KNOWN and not name.startswith(_OF_OTHER_TOOLS):
            notes.append(f"{name} is no variable of flash_attn and has no effect; {nearest(name, KNOWN)}".rstrip("; "))
    if environ.get("NVCC_THREADS"):
        notes.append(
            "NVCC_THREADS has no effect: kernels are compiled by NVRTC, one thread each; MAX_JOBS limits the jobs"
        )
    archs_from = next((name for name in ("FLASH_ATTN_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST") if environ.get(name)), "")
    return Variables(
        force_build=boolean(environ, "FORCE_BUILD") or False,
        skip_cuda_build=boolean(environ, "SKIP_CUDA_BUILD") or False,
        force_cxx11_abi=boolean(environ, "FORCE_CXX11_ABI"),
        no_build=boolean(environ, "FLASH_ATTN_NO_BUILD") or False,
        cuda_archs=environ.get(archs_from),
        cuda_archs_from=archs_from,
        kernels=_list(environ, "FLASH_ATTN_KERNELS"),
        head_dims=_integers(environ, "FLASH_ATTN_HEAD_DIMS"),
        max_jobs=_positive(environ, "MAX_JOBS"),
        nvrtc=environ.get("FLASH_ATTN_NVRTC") or None,
        wheels=environ.get("FLASH_ATTN_WHEELS") or None,
        local_version=_local_version(environ, "FLASH_ATTN_LOCAL_VERSION"),
        build_dir=environ.get("FLASH_ATTN_BUILD_DIR") or None,
        cxx=environ.get("CXX") or None,
        notes=tuple(notes),
    )


def boolean(environ: Mapping[str, str], name: str) -> bool | None:
    """The variable `name` (or its alias) as a boolean, None if it is not set; VariableError if it is neither."""
    values = {}
    for variable in filter(None, (name, _ALIASES.get(name))):
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if text.lower() not in _TRUE + _FALSE:
            raise VariableError(
                f"{variable}={text} is neither true nor false",
                fix=f"write one of {', '.join(_TRUE)} or one of {', '.join(_FALSE)}, in any case",
            )
        values[variable] = text.lower() in _TRUE
    if len(set(values.values())) == 2:
        both = " and ".join(f"{variable}={environ[variable]}" for variable in values)
        raise VariableError(f"{both} contradict each other", why="they are two names of one variable", fix="unset one")
    return next(iter(values.values()), None)


def _list(environ: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = environ.get(name, "")
    if not text.strip():
        return None
    items = tuple(item for item in re.split(r"[\s,;]+", text) if item)
    if not items:
        raise VariableError(f"{name}={text!r} names nothing", fix="separate the items by commas, or unset it")
    return tuple(dict.fromkeys(items))


def _integers(environ: Mapping[str, str], name: str) -> tuple[int, ...] | None:
    items = _list(environ, name)
    if items is None:
        return None
    for item in items:
        if not item.isascii() or not item.isdigit() or int(item) == 0:
            raise VariableError(
                f"{name}={environ[name]}: {item!r} is not a positive integer", fix=f"such as {name}=64,128"
            )
    return tuple(int(item) for item in items)


def _positive(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise VariableError(f"{name}={text} is not a positive integer", fix=f"such as {name}=4, or unset it")
    return int(text)


def _local_version(environ: Mapping[str, str], name: str) -> str | None:
    """The label as PEP 440 normalises it."""
    text = environ.get(name, "").strip().removeprefix("+")
    if not text:
        return None
    if not re.fullmatch(r"[A-Za-z0-9]+(?:[-_.][A-Za-z0-9]+)*", text):
        raise VariableError(
            f"{name}={text!r} is no local version label",
            why="PEP 440 allows ASCII letters and digits, separated by single periods, hyphens or underscores",
            fix=f"such as {name}=cu12.torch26",
        )
    parts = re.split(r"[-_.]", text.lower())
    return ".".join(str(int(part)) if part.isdigit() else part for part in parts)
