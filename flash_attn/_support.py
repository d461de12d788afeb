"""Whether a device can run the kernels, told in advance rather than by the first call."""

from __future__ import annotations

import ctypes

import torch

from ._ops import HOST_LIBRARY

__all__ = ["driver_supports", "supported"]


def supported(device: torch.device | str | int = "cuda") -> tuple[bool, str]:
    """Whether ``flash_attn`` runs on ``device``, and why (not).

    Args:
        device: a ``torch.device``, its string, or the index of a CUDA device; ``"cuda"`` is the current one.

    Returns:
        ``(True, reason)`` or ``(False, reason)``. The reason is one sentence for people: for a GPU it has the compute
        capability found and the architectures that the installed kernels were built for. A missing driver, GPU, CUDA
        build of torch or host library is an answer, not an error.

    Raises:
        RuntimeError: if ``device`` is not the name of any device (torch's own message).
    """
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cpu":
        return True, "CPU tensors run a reference implementation, which is exact but slow."
    if device.type != "cuda":
        return False, f"flash_attn has kernels for CUDA devices and a reference for the CPU; the device is {device}."
    if torch.version.hip is not None:
        return False, f"this torch ({torch.__version__}) was built for ROCm; flash_attn has kernels for CUDA only."
    if torch.version.cuda is None:
        return False, f"this torch ({torch.__version__}) was built without CUDA."
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return driver_supports(index)


def driver_supports(index: int) -> tuple[bool, str]:
    """What the host library says of the driver's device ``index``, whatever torch was built for."""
    if HOST_LIBRARY.failure is not None:
        return False, HOST_LIBRARY.failure[1]
    assert HOST_LIBRARY.handle is not None  # no failure: loaded
    reason = ctypes.create_string_buffer(2048)
    function = HOST_LIBRARY.handle.flash_attn_supported
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    answer = function(index, reason, len(reason)) == 1
    return answer, reason.value.decode("utf-8", "replace")
