"""From the kernel table to a wheel: standard library and `packaging` only, never torch.

The modules that run-time compilation needs (errors, kernels, nvrtc, compile, archive) are also shipped inside the
wheel as `flash_attn._buildtools`, so the same code serves the build and the installed package.
"""
