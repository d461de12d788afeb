// Attention of some query tokens with a long KV cache on Hopper (sm_90a): see common/decode.cuh. A unit is a warpgroup,
// which has 64 rows: its product reads each key from shared memory once, where four warps would read it four times, and the
// time is that of memory again.
#include "common/decode.cuh"
#include "common/hopper.cuh"

namespace {

using namespace decode;

static_assert(kUnitWarps == 4);
using ScoreProduct = hopper::Wgmma<kBf16, kBlockN>;
using OutputProduct = hopper::Wgmma<kBf16, kHeadDim>;

struct Products {
  static constexpr int kTogether = 1;

  unsigned q_tile;

  __device__ __forceinline__ Products(unsigned q_tile, int) : q_tile(q_tile) {}

  static __device__ __forceinline__ void arrived() { hopper::fence_proxy_async(); }

  __device__ __forceinline__ void scores(float (&s)[kBlockN / 8][4], unsigned k_tile) const {
    float (&sums)[kBlockN / 2] = reinterpret_cast<float (&)[kBlockN / 2]>(s);
    const unsigned long long q = hopper::descriptor_k_major(q_tile);
    const unsigned long long k = hopper::descriptor_k_major(k_tile);
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      const int panel = step / 4, column = step % 4 * 32;
      ScoreProduct::shared(sums, hopper::descriptor_after(q, panel * QueryTile::kPanelBytes + column),
                           hopper::descriptor_after(k, panel * KeyTile::kPanelBytes + column), step > 0);
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
    hopper::hold(sums);
  }

  __device__ __forceinline__ void values(float (&out)[kDimTiles][4], const float (&s)[kBlockN / 8][4],
                                         unsigned v_tile) const {
    float (&sums)[kHeadDim / 2] = reinterpret_cast<float (&)[kHeadDim / 2]>(out);
    unsigned probabilities[kBlockN / 16][4];
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        probabilities[step][i] =
            ptx::pack<kBf16>(s[2 * step + i / 2][i % 2 * 2], s[2 * step + i / 2][i % 2 * 2 + 1]);
      }
    }
    const unsigned long long v = hopper::descriptor_mn_major(v_tile, KeyTile::kPanelBytes);
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockN / 16; ++step) {
      OutputProduct::registers(sums, probabilities[step], hopper::descriptor_after(v, step * 16 * tile::kRowBytes));
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
    hopper::hold(sums);
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
