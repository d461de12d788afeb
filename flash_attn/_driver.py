"""What the NVIDIA driver says of itself and of its GPUs, through ctypes: no context is made, no torch needed."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DriverFacts", "Gpu", "read_driver"]

_NAME_LENGTH = 256
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """One GPU, in the driver's order (which is torch's); ``capability`` is (major, minor)."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True)
class DriverFacts:
    """``cuda`` is the newest CUDA version that the driver serves; ``problem`` says why there is no usable GPU.

    ``broken`` tells a driver that is there and does not start from a machine that simply has no driver or no GPU.
    """

    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    broken: bool = False


def read_driver() -> DriverFacts:
    """Never raises: a missing driver is a fact among others."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return DriverFacts(version=_kernel_module_version(), problem=f"no NVIDIA driver: {error}")
    try:
        return _read(cuda)
    except AttributeError as error:  # the message names the function
        problem = f"the NVIDIA driver is too old or not one: {error}"
        return DriverFacts(version=_kernel_module_version(), problem=problem, broken=True)


def _read(cuda: ctypes.CDLL) -> DriverFacts:
    number = ctypes.c_int()
    status = cuda.cuDriverGetVersion(ctypes.byref(number))
    version = _kernel_module_version()
    served = (number.value // 1000, number.value % 1000 // 10) if status == 0 else None
    status = cuda.cuInit(0)
    count = ctypes.c_int()
    if status == 0:
        status = cuda.cuDeviceGetCount(ctypes.byref(count))
    if status not in (0, _NO_DEVICE):
        problem = f"the NVIDIA driver does not start: {_error_name(cuda, status)}"
        return DriverFacts(version, served, problem=problem, broken=True)
    gpus = tuple(_read_gpu(cuda, index) for index in range(count.value))
    if gpus:
        return DriverFacts(version, served, gpus)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden!r})"
    return DriverFacts(version, served, problem=f"the NVIDIA driver sees no GPU{because}")


def _read_gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, memory = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(_NAME_LENGTH)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, _NAME_LENGTH, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        capability.append(value.value)
    return Gpu(index, name.value.decode("utf-8", "replace"), (capability[0], capability[1]), memory.value)


def _error_name(cuda: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, ctypes.byref(name)) == 0 and name.value:
        return f"{name.value.decode(errors='replace')} ({status})"
    return f"CUDA error {status}"


def _kernel_module_version() -> str | None:
    """The driver's own version ("580.159.04"), from the kernel module or else from NVML."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue ..."
        return next(word for word in first.split() if word[0].isdigit() and "." in word)
    except (OSError, IndexError, StopIteration):
        pass
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        found = nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return text.value.decode(errors="replace") if found else None
