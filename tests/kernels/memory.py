"""Memory full of NaN: what a kernel forgets to write, or reads without having written it, shows."""

import ctypes

import torch

_MIB = 2**20


def fill_pool(small=64, large=4):
    """Give torch's allocator free blocks of both its kinds, so that later allocations are served from them."""
    blocks = [torch.empty(_MIB, dtype=torch.uint8, device="cuda") for _ in range(small)]
    blocks += [torch.empty(256 * _MIB, dtype=torch.uint8, device="cuda") for _ in range(large)]
    del blocks


def poison():
    """Set every free byte that torch's allocator holds to 0xFF: NaN in each floating dtype, -1 as an integer."""
    torch.cuda.synchronize()
    driver = ctypes.CDLL("libcuda.so.1")
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                status = driver.cuMemsetD8_v2(
                    ctypes.c_uint64(address), ctypes.c_ubyte(0xFF), ctypes.c_size_t(block["size"])
                )
                assert status == 0, f"cuMemsetD8 answered {status}"
            address += block["size"]
    torch.cuda.synchronize()
