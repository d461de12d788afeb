// What the two flash_bwd kernels, of bwd.cu and of bwd_wide.cu, do alike on their walk.
#pragma once

#include "common/hopper.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"
#include "sm90/bwd_tiles.cuh"
#include "sm90/bwd_work.cuh"

namespace bwd {

constexpr int kScores = kBlockM / 2;  // of a thread: 2 keys, kBlockM / 4 queries
using ScoreProduct = hopper::Wgmma<kBf16, kBlockM>;

// Of the barriers in a step's stage: how often it has been filled before, modulo 2. Persistent, steps are counted on from one
// walk to the next.
__device__ __forceinline__ int parity(int step) { return step / kStages & 1; }

// Past this point, preprocess has run. Only now may postprocess begin, which reads what that has set to zero: it takes the
// SMs that this kernel leaves idle, once its last thread blocks have begun.
__device__ __forceinline__ void begin() {
  ptx::wait_on_dependencies();
  ptx::launch_dependents();
}

// Lets postprocess know how much of a key block's share of its head's dQ is there. The counts were set to zero by preprocess,
// whose results not every thread has waited for.
__device__ __forceinline__ void count_finished(const flash_attn::BwdParams& p, int head_index, int share) {
  ptx::wait_on_dependencies();
  ptx::add_release(p.dq_finished + head_index, share);
}

// The same value, from here on: what is computed of it, descriptors of the walk's products, is not kept in registers.
__device__ __forceinline__ unsigned here(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Fetches a key block's K and V.
__device__ __forceinline__ void load_keys(const flash_attn::BwdTmaParams& params, unsigned k, unsigned v, unsigned full,
                                          const Work& work) {
  const int batch = params.bwd.sequences.cu_seqlens_k != nullptr ? 0 : work.batch;
  const int row = static_cast<int>(work.sequence.k_row) + work.first_key;
  hopper::barrier_expect_bytes(full, 2 * kKeyBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    const unsigned place = panel * kKeyPanel;
    hopper::load_box(k + place, params.k_map, full, panel * 64, row, work.head_kv, batch);
    hopper::load_box(v + place, params.v_map, full, panel * 64, row, work.head_kv, batch);
  }
}

// d = A B^T over kHeadDim columns: A is 64 rows of a key tile, B a query tile. Not waited for.
__device__ __forceinline__ void multiply_transposed(float (&d)[kScores], unsigned key_tile, unsigned query_tile) {
  const unsigned long long keys = hopper::descriptor_k_major(here(key_tile));
  const unsigned long long queries = hopper::descriptor_k_major(query_tile);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    ScoreProduct::shared(d, hopper::descriptor_after(keys, step / 4 * kKeyPanel + step % 4 * 32),
                         hopper::descriptor_after(queries, step / 4 * kQueryPanel + step % 4 * 32), step > 0);
  }
  hopper::wgmma_commit();
}

// Zeroes rows [valid, kRows) of a tile, `threads` together. The copy engine zeroes only what is outside of the tensor;
// what else is there, perhaps NaN, would survive a probability of 0.
template <int kRows>
__device__ __forceinline__ void clear_tail(unsigned tile, int valid, int thread, int threads) {
  const int chunks = (kRows - valid) * 8;
#pragma unroll 1
  for (int i = thread; i < chunks * kPanels; i += threads) {
    const int panel = i / chunks;
    ptx::store_shared_16(tile + panel * kRows * tile::kRowBytes + valid * tile::kRowBytes + (i - panel * chunks) * 16,
                         make_uint4(0, 0, 0, 0));
  }
}

// Scores, 16 of whose rows a warp has, as the A operand of products.
__device__ __forceinline__ void as_operand(unsigned (&a)[kBlockM / 16][4], const float (&s)[kScores]) {
#pragma unroll
  for (int step = 0; step < kBlockM / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[step][i] = ptx::pack<kBf16>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  }
}

// Rounds this warp's 16 keys of dK or dV to 16 bit and writes them out through 16 rows of a tile in shared memory.
template <int kPanelBytes>
__device__ __forceinline__ void store_keys(const float (&d)[kHeadDim / 2], float factor, unsigned rows, void* tensor,
                                           const flash_attn::Strides& stride, const Work& work, int columns,
                                           int first_row, int lane) {
#pragma unroll
  for (int j = 0; j < kHeadDim / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared(rows + j / 8 * kPanelBytes + tile::swizzled(lane / 4 + 8 * half, j % 8) + lane % 4 * 4,
                        ptx::pack<kBf16>(d[4 * j + 2 * half] * factor, d[4 * j + 2 * half + 1] * factor));
    }
  }
  __syncwarp();
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int place = pass * 4 + lane / 8, row = first_row + place;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (row < work.keys && panel * 64 + lane % 8 * 8 < columns) {
        char* const destination = tile::destination(tensor, stride, work.batch, work.head_kv,
                                                    work.sequence.k_row + work.first_key + row, lane);
        *reinterpret_cast<uint4*>(destination + panel * tile::kRowBytes) =
            ptx::load_shared_16(rows + panel * kPanelBytes + tile::swizzled(place, lane % 8));
      }
    }
  }
}

}  // namespace bwd
