"""Errors of the run time: one class per kind of failure.

Every class derives from :class:`FlashAttnError` and from the builtin that a caller would expect, so ``except
ValueError`` keeps working and a caller who wants to tell the kinds apart can. The texts say what was found, why it
matters and what to do.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "DeviceError",
    "DtypeError",
    "FlashAttnError",
    "HostLibraryError",
    "HostLibraryWarning",
    "NotBuiltError",
    "ShapeError",
    "UnsupportedFeatureError",
]


class FlashAttnError(Exception):
    """Base of every error that this package raises."""


class ShapeError(FlashAttnError, ValueError):
    """A tensor's rank or sizes do not fit the call."""


class DtypeError(FlashAttnError, ValueError):
    """A tensor's dtype has no kernel, or the tensors' dtypes differ."""


class DeviceError(FlashAttnError, ValueError):
    """A tensor is on a device that has no implementation, or the tensors' devices differ."""


class ArgumentError(FlashAttnError, ValueError):
    """An argument that is not a tensor (a scale, a probability, a window) has a value outside its range."""


class UnsupportedFeatureError(FlashAttnError, NotImplementedError):
    """A valid argument asks for a feature that this version does not have."""


class NotBuiltError(FlashAttnError, RuntimeError):
    """The package was built without the host library or its kernels (``SKIP_CUDA_BUILD``), or they are missing."""


class HostLibraryError(FlashAttnError, RuntimeError):
    """The host library is there but does not load into this torch (another torch, another ABI, a missing symbol)."""


class HostLibraryWarning(RuntimeWarning):
    """Given once at import where :class:`HostLibraryError` will be raised by the first call on a GPU."""
