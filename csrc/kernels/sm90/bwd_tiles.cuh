// What the kernels of bwd.cu and bwd_wide.cu agree on: their tiles and the order of the workspaces. And the two that go
// over tiles of queries, before flash_bwd and after it.
#pragma once

#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace bwd {

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;  // queries of a step
constexpr int kBlockN = FA_BLOCK_N;  // keys of a thread block
constexpr int kStages = FA_STAGES;   // of Q, dO and dS
constexpr bool kBf16 = FA_BF16;

// Wide: bwd_wide.cu, whose three consumers share 64 keys.
constexpr bool kWide = FA_WIDE;

constexpr int kConsumers = FA_WARPS / 4 - 1;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(!problem::kGeneral, "the sm80 family's");
static_assert(kBlockN == (kWide ? 64 : 64 * kConsumers) && kThreads == FA_WARPS * 32);
static_assert(kBlockM % 16 == 0 && kHeadDim % 64 == 0 && kStages == 2);
static_assert(kConsumers == 3 || (kConsumers == 2 && !kWide), "setmaxnreg");

// dQ of a step is computed in parts: 64 of its queries or, transposed, 64 of its columns for each consumer; wide, halves
// of its columns.
constexpr bool kDqTransposed = !kWide && kBlockM != 64 * kConsumers;
static_assert(!kDqTransposed || kHeadDim == 64 * kConsumers);
static_assert(!kWide || kBlockM == 64);
constexpr int kDqParts = kWide ? 2 : kConsumers;
constexpr int kDqWidth = kDqTransposed ? kBlockM : kWide ? kHeadDim / 2 : kHeadDim;
constexpr int kDqBytes = 64 * kDqWidth * 4;

constexpr int kPanels = kHeadDim / 64;
constexpr int kQueryPanel = kBlockM * tile::kRowBytes;  // also of dS: queries by 64 keys
constexpr int kQueryBytes = kPanels * kQueryPanel;
constexpr int kKeyPanel = kBlockN * tile::kRowBytes;
constexpr int kKeyBytes = kPanels * kKeyPanel;
constexpr float kLog2e = 1.4426950408889634074f;

constexpr int kFinished = kWide ? 4 : 4 * kConsumers;  // what a key block adds to its head's dq_finished: 1 of each warp

// The first of sequence `batch`'s tiles of kBlockM rows, in the workspaces, among those of a head.
__device__ __forceinline__ int first_tile(const flash_attn::BwdParams& p, int batch) {
  const int* const cu_seqlens = p.sequences.cu_seqlens_q;
  return cu_seqlens != nullptr ? cu_seqlens[batch] / kBlockM + batch : batch * p.blocks_m;
}

// Where the row statistics of a tile's query are: those that one thread needs of 16 queries lie together.
__device__ __forceinline__ int statistics_place(int query) {
  return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2;
}

// A query tile of the workspaces, for the kernels before and after.
struct QueryTile {
  int block_m, batch, head;
  problem::Sequence sequence;
  int rows;
  long long tile;

  __device__ __forceinline__ explicit QueryTile(const flash_attn::BwdParams& p)
      : block_m(blockIdx.x % p.blocks_m),
        batch(blockIdx.x / p.blocks_m / p.heads),
        head(blockIdx.x / p.blocks_m - batch * p.heads),
        sequence(p, batch),
        rows(sequence.seqlen_q - block_m * kBlockM),
        tile(static_cast<long long>(head) * p.total_tiles + first_tile(p, batch) + block_m) {}
};

// delta, the log-sum-exp in base 2, and zeroed accumulators.
__device__ __forceinline__ void preprocess(const flash_attn::BwdParams& p) {
  const int thread = threadIdx.x;
  const QueryTile at(p);
  ptx::launch_dependents();
  if (thread == 0 && blockIdx.x < p.batch * p.heads_kv) p.dq_finished[blockIdx.x] = 0;
  if (thread == 0 && blockIdx.x == 0) *p.next_block = 0;
  if (at.rows <= 0) return;
  const long long first_row = at.sequence.q_row + at.block_m * kBlockM;
  const long long lse_row = at.batch * p.lse_batch_stride + at.head * p.lse_head_stride + first_row;
  // Eight threads a row.
  constexpr int kRowStep = kThreads / 8;
#pragma unroll
  for (int pass = 0; pass < (kBlockM + kRowStep - 1) / kRowStep; ++pass) {
    const int row = thread / 8 + pass * kRowStep;
    const bool inside = row < at.rows && row < kBlockM;
    float sum = 0.0f;
    if (inside) {
      const char* const out = tile::source(p.out, p.out_stride, at.batch, at.head, first_row + row, thread);
      const char* const dout = tile::source(p.dout, p.dout_stride, at.batch, at.head, first_row + row, thread);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        if (thread % 8 * 8 + panel * 64 < p.head_dim_v) {
          const uint4 a = *reinterpret_cast<const uint4*>(out + panel * tile::kRowBytes);
          const uint4 b = *reinterpret_cast<const uint4*>(dout + panel * tile::kRowBytes);
          tile::add_product<kBf16>(sum, a, b);
        }
      }
    }
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (thread % 8 == 0 && row < kBlockM) {
      // Padding rows and rows that see no key get +inf: their probabilities, exp2(s - inf), are 0 without a test.
      const float lse = inside ? p.lse[lse_row + row] : ptx::kMinusInfinity;
      if (inside && p.dlse != nullptr) sum -= p.dlse[lse_row + row];
      // Whatever the gradient of an output that depends on nothing.
      if (lse == ptx::kMinusInfinity) sum = 0.0f;
      const long long place = at.tile * kBlockM + statistics_place(row);
      p.lse_log2[place] = lse == ptx::kMinusInfinity ? -ptx::kMinusInfinity : lse * kLog2e;
      p.delta[place] = sum;
    }
  }

  uint4* const accumulator = reinterpret_cast<uint4*>(p.dq_accum + at.tile * (kBlockM * kHeadDim));
#pragma unroll 4
  for (int i = thread; i < kBlockM * kHeadDim / 4; i += kThreads) accumulator[i] = make_uint4(0, 0, 0, 0);
  if (thread == 0) p.dq_semaphore[at.tile] = 0;
}

// The fp32 dQ, scaled and rounded to 16 bit.
__device__ __forceinline__ void postprocess(const flash_attn::BwdParams& p) {
  __shared__ __align__(1024) char rounded[kQueryBytes];
  const QueryTile at(p);
  // As long as flash_bwd is running, those heads can be finished whose key blocks are all done. Every block makes sure of its
  // own, so that this kernel does not end before flash_bwd does.
  const int finished = ptx::load_acquire(p.dq_finished + at.batch * p.heads_kv + at.head / p.group);
  if (finished != kFinished * p.blocks_n) ptx::wait_on_dependencies();
  if (at.rows <= 0) return;
  const int lane = threadIdx.x % 32;
  const unsigned shared = ptx::shared_address(rounded);
  const float4* const accumulator = reinterpret_cast<const float4*>(p.dq_accum + at.tile * (kBlockM * kHeadDim));

  // A warp of flash_bwd holds 16 rows of dQ or of its transpose; a warp here takes 16 columns of them at a time.
  constexpr int kPairs = kDqWidth / 16;
  for (int i = threadIdx.x / 32; i < kDqParts * 4 * kPairs; i += kThreads / 32) {
    const int group = i / (4 * kPairs);
    const int warp = i / kPairs % 4;
    const int pair = i % kPairs;
    const float4* const source = accumulator + ((group * 4 + warp) * (kDqWidth / 8) + 2 * pair) * 32 + lane;
    const float4 left = source[0], right = source[32];
    const unsigned r[4] = {
        ptx::pack<kBf16>(left.x * p.scale, left.y * p.scale), ptx::pack<kBf16>(left.z * p.scale, left.w * p.scale),
        ptx::pack<kBf16>(right.x * p.scale, right.y * p.scale), ptx::pack<kBf16>(right.z * p.scale, right.w * p.scale)};
    if constexpr (kDqTransposed) {
      // Rows are columns of dQ: matrices 0 and 1 are its chunks of eight, 2 and 3 the same of the next eight queries.
      ptx::stmatrix_x4_trans(shared + group * kQueryPanel + tile::swizzled(pair * 16 + lane / 16 * 8 + lane % 8,
                                                                           warp * 2 + lane / 8 % 2),
                             r);
    } else {
      const int row = (kWide ? 0 : group * 64) + warp * 16 + lane / 4;
      const unsigned panel = shared + ((kWide ? group * (kPanels / 2) : 0) + pair / 4) * kQueryPanel;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ptx::store_shared(panel + tile::swizzled(row + e % 2 * 8, pair * 2 % 8 + e / 2) + lane % 4 * 4, r[e]);
      }
    }
  }
  __syncthreads();
  for (int row = threadIdx.x / 8; row < min(at.rows, kBlockM); row += kThreads / 8) {
    char* const destination = tile::destination(p.dq, p.dq_stride, at.batch, at.head,
                                                at.sequence.q_row + at.block_m * kBlockM + row, threadIdx.x);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      if (panel * 64 + threadIdx.x % 8 * 8 < p.head_dim) {
        *reinterpret_cast<uint4*>(destination + panel * tile::kRowBytes) =
            ptx::load_shared_16(shared + panel * kQueryPanel + tile::swizzled(row, threadIdx.x % 8));
      }
    }
  }
}

}  // namespace bwd
