"""Operations with kernels in Triton, which comes with a CUDA build of torch; CPU tensors need none."""
