// Attention of few query tokens with a long KV cache: see common/decode.cuh. A unit is a warp, which has 16 rows.
#include "common/decode.cuh"

namespace {

using namespace decode;

static_assert(kUnitWarps == 1);
// Above, Q and the accumulators do not fit into registers together: Q is read again for every tile.
constexpr bool kQueryInRegisters = kHeadDim <= 128;

struct Products {
  // With one tile alone a warp of a team waits for its own products most of the time.
  static constexpr int kTogether = kBlockN == 16 && kHeadDim <= 128 ? 2 : 1;

  unsigned query[kHeadDim / 16][4];
  tile::Fragment<true> query_fragment;
  int lane;

  __device__ __forceinline__ Products(unsigned q_tile, int lane) : query_fragment(q_tile, lane), lane(lane) {
    if constexpr (kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) read_query(step);
    }
  }

  __device__ __forceinline__ void read_query(int step) {
    ptx::ldmatrix_x4(query[step], query_fragment.at<kBlockM>(0, step));
  }

  static __device__ __forceinline__ void arrived() {}

  template <int kEights>
  __device__ __forceinline__ void scores(float (&s)[kEights][4], unsigned k_tile) {
#pragma unroll
    for (int j = 0; j < kEights; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
    }
    const tile::Fragment<false> k_fragment(k_tile, lane);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      if constexpr (!kQueryInRegisters) read_query(step);
#pragma unroll
      for (int j = 0; j < kEights / 2; ++j) {
        unsigned k[4];
        ptx::ldmatrix_x4(k, k_fragment.at<kBlockN>(16 * j % kBlockN, step) + 16 * j / kBlockN * kUnitBytes);
        ptx::mma_16816<kBf16>(s[2 * j], query[step], k[0], k[1]);
        ptx::mma_16816<kBf16>(s[2 * j + 1], query[step], k[2], k[3]);
      }
    }
  }

  template <int kEights>
  __device__ __forceinline__ void values(float (&out)[kDimTiles][4], const float (&s)[kEights][4], unsigned v_tile) {
    const tile::Fragment<true> v_fragment(v_tile, lane);
#pragma unroll
    for (int step = 0; step < kEights / 2; ++step) {
      const unsigned a[4] = {ptx::pack<kBf16>(s[2 * step][0], s[2 * step][1]),
                             ptx::pack<kBf16>(s[2 * step][2], s[2 * step][3]),
                             ptx::pack<kBf16>(s[2 * step + 1][0], s[2 * step + 1][1]),
                             ptx::pack<kBf16>(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
      for (int j = 0; j < kDimTiles / 2; ++j) {
        unsigned v[4];
        ptx::ldmatrix_x4_trans(v, v_fragment.at<kBlockN>(16 * step % kBlockN, j) + 16 * step / kBlockN * kUnitBytes);
        ptx::mma_16816<kBf16>(out[2 * j], a, v[0], v[1]);
        ptx::mma_16816<kBf16>(out[2 * j + 1], a, v[2], v[3]);
      }
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_decode(const __grid_constant__ flash_attn::DecodeParams p) {
  attend_cache<Products>(p);
}

extern "C" __global__ void __launch_bounds__(flash_attn::kCombineThreads, kCombineBlocks)
    flash_combine(const __grid_constant__ flash_attn::DecodeParams p) {
  join_splits(p);
}
