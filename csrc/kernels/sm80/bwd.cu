// Attention backward for compute capability 8.0 and up: dQ, dK and dV of O = softmax(scale Q K^T) V.
//
// Three kernels of one module, launched in order (FlashAttention-2, Dao 2023, algorithm 2):
//   flash_bwd_preprocess   delta = rowsum(dO * O), the log-sum-exp in base 2, and zeroed accumulators
//   flash_bwd              a thread block owns FA_BLOCK_N keys of one KV head and walks the queries of its group
//   flash_bwd_postprocess  the fp32 dQ, scaled and rounded to 16 bit
//
// S and dP are computed transposed, keys by queries, 16 keys a warp: their accumulators are, as they stand, the A operands
// of dV = P^T dO and dK = dS^T Q, which stay in registers over the whole walk. Only dS goes through shared memory, for
// dQ = dS K, whose sum over the keys crosses warps and thread blocks; it is added to dq_accum in device memory, in the
// order of the registers, so that every red is coalesced.
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;  // queries of a step
constexpr int kBlockN = FA_BLOCK_N;  // keys of a thread block
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;  // of Q, dO and dS
constexpr bool kBf16 = FA_BF16;
constexpr bool kCausal = FA_CAUSAL;

constexpr int kThreads = kWarps * 32;
constexpr int kQueryTiles = kBlockM / 8;
constexpr int kDimTiles = kHeadDim / 8;
static_assert(kBlockN == 16 * kWarps, "a warp owns 16 keys");
static_assert(kStages == 2, "the walk alternates between two");

// dQ of a step, kBlockM x kHeadDim, is split over the warps in pieces of 32 rows.
constexpr int kDqRowWarps = kBlockM / 32;
constexpr int kDqColumnWarps = kWarps / kDqRowWarps;
constexpr int kDqColumns = kHeadDim / kDqColumnWarps;
constexpr int kDqTiles = kDqColumns / 8;
static_assert(kDqRowWarps * kDqColumnWarps == kWarps && kDqColumns % 16 == 0);

constexpr int kKeyBytes = kBlockN * kHeadDim * 2;
constexpr int kQueryBytes = kBlockM * kHeadDim * 2;
constexpr int kScorePanels = (kBlockM + tile::kPanelColumns - 1) / tile::kPanelColumns;
constexpr int kScorePanelBytes = kBlockN * tile::kRowBytes;
constexpr int kScoreBytes = kScorePanels * kScorePanelBytes;
constexpr int kRowStatBytes = kBlockM * 4;
static_assert(2 * kKeyBytes + 2 * kStages * kQueryBytes + kStages * kScoreBytes +
                      2 * kStages * kRowStatBytes == FA_SMEM_BYTES,
              "kernels.toml: smem of bwd");

using KeyCopy = tile::Copy<kBlockN, kHeadDim, kThreads>;
using QueryCopy = tile::Copy<kBlockM, kHeadDim, kThreads>;

extern __shared__ __align__(1024) char shared_memory[];

// Place of a thread's four floats `quad` in a dQ tile of dq_accum.
__device__ __forceinline__ int dq_offset(int warp, int quad, int lane) {
  return ((warp * 2 * kDqTiles + quad) * 32 + lane) * 4;
}

template <int kRows>
__device__ __forceinline__ void zero(float (&tiles)[kRows][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) tiles[i][e] = 0.0f;
  }
}

// The A operand of 16 columns of a 16-row accumulator.
__device__ __forceinline__ void as_operand(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = ptx::pack<kBf16>(left[0], left[1]);
  a[1] = ptx::pack<kBf16>(left[2], left[3]);
  a[2] = ptx::pack<kBf16>(right[0], right[1]);
  a[3] = ptx::pack<kBf16>(right[2], right[3]);
}

// d[16 x 8 kTiles] += A B^T: A is 16 rows of one tile, B all kColumns rows of another, both kHeadDim wide.
template <int kRowsA, int kTiles>
__device__ __forceinline__ void multiply_transposed(float (&d)[kTiles][4], const tile::Fragment<true>& a_fragment,
                                                    const tile::Fragment<false>& b_fragment) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    unsigned a[4];
    ptx::ldmatrix_x4(a, a_fragment.at<kRowsA>(0, step));
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4(b, b_fragment.at<8 * kTiles>(16 * j, step));
      ptx::mma_16816<kBf16>(d[2 * j], a, b[0], b[1]);
      ptx::mma_16816<kBf16>(d[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// d[16 x kHeadDim] += A B: A is a 16 x 8 kTiles accumulator in registers, B a tile of 8 kTiles rows.
template <int kTiles>
__device__ __forceinline__ void multiply_registers(float (&d)[kDimTiles][4], const float (&scores)[kTiles][4],
                                                   const tile::Fragment<true>& b_fragment) {
#pragma unroll
  for (int step = 0; step < kTiles / 2; ++step) {
    unsigned a[4];
    as_operand(a, scores[2 * step], scores[2 * step + 1]);
#pragma unroll
    for (int j = 0; j < kDimTiles / 2; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, b_fragment.at<8 * kTiles>(16 * step, j));
      ptx::mma_16816<kBf16>(d[2 * j], a, b[0], b[1]);
      ptx::mma_16816<kBf16>(d[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Rounds a warp's 16 rows to 16 bit and writes them to a tile in shared memory.
template <int kRows>
__device__ __forceinline__ void store_rows(unsigned tile_address, const float (&d)[kDimTiles][4], int row, int lane,
                                           float factor) {
#pragma unroll
  for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared(tile_address + j / 8 * kRows * tile::kRowBytes +
                            tile::swizzled(row + half * 8 + lane / 4, j % 8) + lane % 4 * 4,
                        ptx::pack<kBf16>(d[j][2 * half] * factor, d[j][2 * half + 1] * factor));
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_preprocess(const __grid_constant__ flash_attn::BwdParams p) {
  const int thread = threadIdx.x;
  const int head_index = blockIdx.x / p.blocks_m;
  const int block_m = blockIdx.x - head_index * p.blocks_m;
  const int batch = head_index / p.heads;
  const int head = head_index - batch * p.heads;
  const QueryCopy copy(thread, p.head_dim);
  const long long padded_row = static_cast<long long>(blockIdx.x) * kBlockM;

#pragma unroll
  for (int pass = 0; pass < QueryCopy::kPasses; ++pass) {
    const int row_in_block = copy.row + pass * QueryCopy::kRowStep;
    const int row = block_m * kBlockM + row_in_block;
    const bool inside = row < p.seqlen_q;
    float sum = 0.0f;
    const char* const out = tile::source(p.out, p.out_stride, batch, head, row, thread);
    const char* const dout = tile::source(p.dout, p.dout_stride, batch, head, row, thread);
#pragma unroll
    for (int panel = 0; panel < QueryCopy::kPanels; ++panel) {
      if (inside && copy.bytes[panel] != 0) {
        const uint4 a = *reinterpret_cast<const uint4*>(out + panel * tile::kRowBytes);
        const uint4 b = *reinterpret_cast<const uint4*>(dout + panel * tile::kRowBytes);
        const unsigned as[4] = {a.x, a.y, a.z, a.w};
        const unsigned bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float a_low, a_high, b_low, b_high;
          ptx::unpack<kBf16>(as[i], a_low, a_high);
          ptx::unpack<kBf16>(bs[i], b_low, b_high);
          sum = fmaf(a_low, b_low, fmaf(a_high, b_high, sum));
        }
      }
    }
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (thread % 8 == 0) {
      // Padding rows and rows that see no key get +inf: their probabilities, exp2(s - inf), are 0 without a test.
      constexpr float kLog2e = 1.4426950408889634074f;
      const float lse =
          inside ? p.lse[static_cast<long long>(head_index) * p.seqlen_q + row] : ptx::kMinusInfinity;
      p.lse_log2[padded_row + row_in_block] = lse == ptx::kMinusInfinity ? -ptx::kMinusInfinity : lse * kLog2e;
      p.delta[padded_row + row_in_block] = sum;
    }
  }

  uint4* const accumulator = reinterpret_cast<uint4*>(p.dq_accum + padded_row * kHeadDim);
#pragma unroll 4
  for (int i = thread; i < kBlockM * kHeadDim / 4; i += kThreads) accumulator[i] = make_uint4(0, 0, 0, 0);
  if (thread == 0) p.dq_semaphore[blockIdx.x] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_bwd(const __grid_constant__ flash_attn::BwdParams p) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;

  // Key blocks of a head are neighbours, so that its Q and dO stay in L2; under a causal mask the first are the longest.
  const int head_index = blockIdx.x / p.blocks_n;
  const int block_n = blockIdx.x - head_index * p.blocks_n;
  const int batch = head_index / p.heads_kv;
  const int head_kv = head_index - batch * p.heads_kv;
  const int first_key = block_n * kBlockN;
  const int keys = p.seqlen_k - first_key;    // of this block that exist, if fewer than kBlockN
  const int shift = p.seqlen_k - p.seqlen_q;  // row i sees keys up to i + shift

  // Query blocks [first_m, blocks_m) see a key of this block; those below full_m need the causal mask.
  const int first_m = kCausal ? min(p.blocks_m, max(0, first_key - shift) / kBlockM) : 0;
  const int full_m = kCausal ? (max(0, first_key + kBlockN - 1 - shift) + kBlockM - 1) / kBlockM : 0;
  const int blocks_per_head = p.blocks_m - first_m;

  const unsigned shared_k = ptx::shared_address(shared_memory);
  const unsigned shared_v = shared_k + kKeyBytes;
  const unsigned shared_q = shared_v + kKeyBytes;
  const unsigned shared_do = shared_q + kStages * kQueryBytes;
  const unsigned shared_ds = shared_do + kStages * kQueryBytes;
  const unsigned shared_lse = shared_ds + kStages * kScoreBytes;  // then delta, per stage
  const KeyCopy key_copy(thread, p.head_dim);
  const QueryCopy query_copy(thread, p.head_dim);

  struct Position {
    int head, m;
  };
  auto load_queries = [&](int stage, Position position) {
    const int head = position.head;
    const int m = position.m;
    const int row = m * kBlockM;
    query_copy.load<true>(shared_q + stage * kQueryBytes,
                          tile::source(p.q, p.q_stride, batch, head, row + query_copy.row, thread),
                          2 * p.q_stride.row, p.seqlen_q - row);
    query_copy.load<true>(shared_do + stage * kQueryBytes,
                          tile::source(p.dout, p.dout_stride, batch, head, row + query_copy.row, thread),
                          2 * p.dout_stride.row, p.seqlen_q - row);
    // Row statistics are padded to whole blocks: no test.
    if (thread < kBlockM / 2) {
      const bool is_delta = thread >= kBlockM / 4;
      const int i = thread % (kBlockM / 4) * 4;
      const float* const source = (is_delta ? p.delta : p.lse_log2) +
                                  ((static_cast<long long>(batch) * p.heads + head) * p.blocks_m + m) * kBlockM + i;
      ptx::cp_async_16(shared_lse + (2 * stage + is_delta) * kRowStatBytes + i * 4, source);
    }
  };

  float dk[kDimTiles][4];
  float dv[kDimTiles][4];
  zero(dk);
  zero(dv);

  // The walk: the queries of every head of the group. `next` runs two steps ahead of the arithmetic.
  auto advance = [&](Position& position) {
    if (++position.m == p.blocks_m) {
      position.m = first_m;
      ++position.head;
    }
  };
  Position current{head_kv * p.group, first_m};
  Position next = current;
  const int steps = blocks_per_head * p.group;
  if (steps > 0) {
    key_copy.load<true>(shared_k, tile::source(p.k, p.k_stride, batch, head_kv, first_key + key_copy.row, thread),
                        2 * p.k_stride.row, keys);
    key_copy.load<true>(shared_v, tile::source(p.v, p.v_stride, batch, head_kv, first_key + key_copy.row, thread),
                        2 * p.v_stride.row, keys);
    load_queries(0, next);
    ptx::cp_async_commit();
    advance(next);
    if (steps > 1) load_queries(1, next);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
  }

  const tile::Fragment<true> k_rows(shared_k + warp * 16 * tile::kRowBytes, lane);
  const tile::Fragment<true> v_rows(shared_v + warp * 16 * tile::kRowBytes, lane);
  const int key = warp * 16 + lane / 4;
  const int dq_chunk = warp % kDqRowWarps * 4;                // first 16-byte chunk of this warp's dQ rows in dS
  const int dq_column = warp / kDqRowWarps * kDqColumns / 8;  // and of its columns in K

  for (int step = 0; step < steps; ++step) {
    const int stage = step & 1;
    const unsigned q_tile = shared_q + stage * kQueryBytes;
    const unsigned do_tile = shared_do + stage * kQueryBytes;
    const unsigned ds_tile = shared_ds + stage * kScoreBytes;
    const unsigned lse_address = shared_lse + 2 * stage * kRowStatBytes + lane % 4 * 8;

    float s[kQueryTiles][4];
    zero(s);
    multiply_transposed<kBlockN>(s, k_rows, tile::Fragment<false>(q_tile, lane));
    if (keys < kBlockN || (kCausal && current.m < full_m)) {
      // Column of the first query that sees keys `key` and `key + 8`; past the tensor none does.
      const int diagonal = kCausal ? first_key - shift - current.m * kBlockM + key - lane % 4 * 2 : -kBlockM;
      const int low = key < keys ? diagonal : kBlockM;
      const int high = key + 8 < keys ? diagonal + 8 : kBlockM;
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j) {
        if (8 * j < low) s[j][0] = ptx::kMinusInfinity;
        if (8 * j + 1 < low) s[j][1] = ptx::kMinusInfinity;
        if (8 * j < high) s[j][2] = ptx::kMinusInfinity;
        if (8 * j + 1 < high) s[j][3] = ptx::kMinusInfinity;
      }
    }
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
      const float2 lse = ptx::load_shared_float2(lse_address + j * 32);
      s[j][0] = ptx::exp2(fmaf(s[j][0], p.scale_log2, -lse.x));
      s[j][1] = ptx::exp2(fmaf(s[j][1], p.scale_log2, -lse.y));
      s[j][2] = ptx::exp2(fmaf(s[j][2], p.scale_log2, -lse.x));
      s[j][3] = ptx::exp2(fmaf(s[j][3], p.scale_log2, -lse.y));
    }

    // The accumulators of dP start at -delta, so that dS = P (dP - delta) is one product.
    float ds[kQueryTiles][4];
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
      const float2 delta = ptx::load_shared_float2(lse_address + kRowStatBytes + j * 32);
      ds[j][0] = ds[j][2] = -delta.x;
      ds[j][1] = ds[j][3] = -delta.y;
    }
    multiply_transposed<kBlockN>(ds, v_rows, tile::Fragment<false>(do_tile, lane));
    multiply_registers(dv, s, tile::Fragment<true>(do_tile, lane));
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[j][e] *= s[j][e];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared(ds_tile + j / 8 * kScorePanelBytes + tile::swizzled(key + half * 8, j % 8) + lane % 4 * 4,
                          ptx::pack<kBf16>(ds[j][2 * half], ds[j][2 * half + 1]));
      }
    }
    multiply_registers(dk, ds, tile::Fragment<true>(q_tile, lane));

    // The one barrier of a step: dS is complete, Q and dO of the next step have arrived, and those of this step are read
    // for the last time. dS has two stages, so that a warp may run ahead into the next step while others work on dQ.
    ptx::cp_async_wait<0>();
    __syncthreads();
    advance(next);
    if (step + 2 < steps) load_queries(stage, next);
    ptx::cp_async_commit();

    // dQ of this step: 32 rows by kDqColumns a warp, over all keys of the block.
    float dq[2][kDqTiles][4];
    zero(dq[0]);
    zero(dq[1]);
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
      unsigned a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int chunk = dq_chunk + 2 * i + (lane >> 3 & 1);
        ptx::ldmatrix_x4_trans(a[i], ds_tile + chunk / 8 * kScorePanelBytes +
                                         tile::swizzled((lane & 7) + (lane >> 4 << 3), chunk % 8) +
                                         k * 16 * tile::kRowBytes);
      }
#pragma unroll
      for (int j = 0; j < kDqTiles / 2; ++j) {
        unsigned b[4];
        const int chunk = dq_column + 2 * j + (lane >> 4);
        ptx::ldmatrix_x4_trans(b, shared_k + chunk / 8 * KeyCopy::kPanelBytes + tile::swizzled(lane & 15, chunk % 8) +
                                      k * 16 * tile::kRowBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::mma_16816<kBf16>(dq[i][2 * j], a[i], b[0], b[1]);
          ptx::mma_16816<kBf16>(dq[i][2 * j + 1], a[i], b[2], b[3]);
        }
      }
    }
    const long long dq_tile = (static_cast<long long>(batch) * p.heads + current.head) * p.blocks_m + current.m;
    float* const accumulator = p.dq_accum + dq_tile * (kBlockM * kHeadDim);
    int* const semaphore = p.dq_semaphore + dq_tile;
    advance(current);
    if (p.deterministic) {
      // All key blocks below this one have a lower block index and are running or done: the wait ends.
      if (thread == 0) {
        while (ptx::load_acquire(semaphore) != block_n) {
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < kDqTiles; ++j) {
        ptx::red_add_4(accumulator + dq_offset(warp, i * kDqTiles + j, lane), dq[i][j]);
      }
    }
    if (p.deterministic) {
      __threadfence();
      __syncthreads();
      if (thread == 0) ptx::store_release(semaphore, block_n + 1);
    }
  }

  // dK and dV take the place of K and V.
  ptx::cp_async_wait<0>();
  __syncthreads();
  store_rows<kBlockN>(shared_k, dk, warp * 16, lane, p.scale);
  store_rows<kBlockN>(shared_v, dv, warp * 16, lane, 1.0f);
  __syncthreads();
  key_copy.store(shared_k,
                 const_cast<char*>(tile::source(p.dk, p.dk_stride, batch, head_kv, first_key + key_copy.row, thread)),
                 2 * p.dk_stride.row, keys);
  key_copy.store(shared_v,
                 const_cast<char*>(tile::source(p.dv, p.dv_stride, batch, head_kv, first_key + key_copy.row, thread)),
                 2 * p.dv_stride.row, keys);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_postprocess(const __grid_constant__ flash_attn::BwdParams p) {
  __shared__ __align__(1024) char rounded[kQueryBytes];
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int head_index = blockIdx.x / p.blocks_m;
  const int block_m = blockIdx.x - head_index * p.blocks_m;
  const int batch = head_index / p.heads;
  const int head = head_index - batch * p.heads;
  const unsigned shared = ptx::shared_address(rounded);
  const float* const accumulator = p.dq_accum + static_cast<long long>(blockIdx.x) * (kBlockM * kHeadDim);

#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < kDqTiles; ++j) {
      const float4 v = *reinterpret_cast<const float4*>(accumulator + dq_offset(warp, i * kDqTiles + j, lane));
      const int row = warp % kDqRowWarps * 32 + i * 16 + lane / 4;
      const int chunk = warp / kDqRowWarps * kDqTiles + j;
      const unsigned panel = shared + chunk / 8 * QueryCopy::kPanelBytes;
      ptx::store_shared(panel + tile::swizzled(row, chunk % 8) + lane % 4 * 4,
                        ptx::pack<kBf16>(v.x * p.scale, v.y * p.scale));
      ptx::store_shared(panel + tile::swizzled(row + 8, chunk % 8) + lane % 4 * 4,
                        ptx::pack<kBf16>(v.z * p.scale, v.w * p.scale));
    }
  }
  __syncthreads();
  const QueryCopy copy(thread, p.head_dim);
  copy.store(
      shared,
      const_cast<char*>(tile::source(p.dq, p.dq_stride, batch, head, block_m * kBlockM + copy.row, thread)),
      2 * p.dq_stride.row, p.seqlen_q - block_m * kBlockM);
}
