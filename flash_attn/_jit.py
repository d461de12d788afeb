"""Compiling kernels at first use: the host library's questions, answered by :mod:`flash_attn._buildtools.jit`.

The host library asks where its kernel set has nothing for a call. It does so once for each kernel and device, holding
no lock, from whichever thread made the call; ctypes takes Python's global lock for the answer, and the compiler runs
without it. Nothing of this is imported before the first question.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

from ._installed import PACKAGE, buildtools

__all__ = ["compiler_of", "find_kernel", "register"]

_log = logging.getLogger("flash_attn")


class _Request(ctypes.Structure):
    """``flash_attn_compile_request`` of csrc/host/jit.h."""

    _fields_ = (
        ("op", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("mask", ctypes.c_char_p),
        ("families", ctypes.c_char_p),
        ("head_dim", ctypes.c_int),
        ("device", ctypes.c_int),
        ("capability", ctypes.c_int),
        ("shared_bytes", ctypes.c_int),
        ("driver_version", ctypes.c_int),
    )


_Function = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Request), ctypes.c_void_p)
# Called until the process ends, so never collected.
_registered: list[Any] = []


def register(handle: ctypes.CDLL, package: Path = PACKAGE) -> None:
    """Make the host library ``handle`` compile what its kernel set lacks with the sources in ``package``."""
    give = handle.flash_attn_compile_answer
    give.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    give.restype = None

    def answer(request: Any, to: int) -> None:
        data: bytes | None = None
        try:
            possible, text, data = _answer(package, request.contents)
        except KeyboardInterrupt:
            possible, text = False, "it was interrupted."
            # Raised in here it would be lost: another thread does it again when the call is over.
            threading.Timer(0.01, _thread.interrupt_main).start()
        except BaseException as error:  # a ctypes callback cannot raise
            possible, text = False, _explain(error)
        give(to, possible, data, len(data or b""), text.encode())

    function = _Function(answer)
    _registered.append(function)
    handle.flash_attn_set_compiler.argtypes = [_Function]
    handle.flash_attn_set_compiler.restype = None
    handle.flash_attn_set_compiler(function)


def _answer(package: Path, asked: _Request) -> tuple[bool, str, bytes | None]:
    """(whether it can be compiled, text, the archive if a kernel was asked for)."""
    jit = buildtools("jit")
    version = asked.driver_version
    target = jit.Target(asked.capability, asked.shared_bytes, (version // 1000, version % 1000 // 10))
    families = tuple(asked.families.decode().split(","))
    if asked.head_dim == 0:
        return True, compiler_of(target, families, package), None
    op, dtype, mask = asked.op.decode(), asked.dtype.decode(), asked.mask.decode()
    product = find_kernel(jit.Request(op, dtype, mask, asked.head_dim, families), target, package)
    return True, product.origin, product.data


def compiler_of(target: Any, families: tuple[str, ...], package: Path = PACKAGE) -> str:
    """What compiles for ``target`` at first use, as the rest of a sentence. A BuildError says why nothing does."""
    jit = buildtools("jit")
    jit.check_enabled(os.environ)
    compiler = jit.find_compiler(os.environ, search_path(), target.driver_cuda)
    jit.check_target(_jit(package).table, families, target, compiler.supported)
    return f"by NVRTC {compiler.version} ({compiler.library.path})."


def find_kernel(request: Any, target: Any, package: Path = PACKAGE) -> Any:
    """The ``Product`` for ``request`` on ``target``, compiled unless cached. A BuildError says why there is none."""
    product = _jit(package).find(request, target)
    name = product.kernel.name
    if product.origin == "compiled":
        _log.info("kernel %s compiled in %.2f s", name, product.seconds)
    if product.uncached:
        _warn_uncached(product.uncached)
    return product


@functools.cache  # once for each reason
def _warn_uncached(why: str) -> None:
    _log.warning(
        "flash_attn: kernels that are compiled at first use will be compiled again by the next process: %s. Set "
        "FLASH_ATTN_CACHE_DIR to a folder that can be written.",
        why,
    )


def search_path() -> list[str]:
    """Where NVRTC is looked for: the path of this process, and the folder that torch came from."""
    torch = sys.modules.get("torch")
    own = [str(Path(torch.__file__).resolve().parent.parent)] if torch is not None and torch.__file__ else []
    return list(dict.fromkeys([*own, *sys.path]))


def _jit(package: Path) -> Any:
    cache = buildtools("cache").cache_folder(os.environ)
    return _jit_of(package, cache)


@functools.cache
def _jit_of(package: Path, _cache: Path | None) -> Any:
    """One object for each cache folder, so that a changed FLASH_ATTN_CACHE_DIR has its effect."""
    return buildtools("jit").Jit(package, os.environ, search_path())


def _explain(error: BaseException) -> str:
    try:
        jit = buildtools("jit")
        if isinstance(error, buildtools("errors").BuildError):
            return str(jit.sentence(error))
    except ImportError as missing:
        return f"{missing}. Install flash-attn again."
    _log.error("compiling a kernel at first use failed", exc_info=error)
    return f"{type(error).__name__}: {error}."
