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
//
// Where dK and dV of 16 keys do not fit into registers together (FA_SPLIT), two thread blocks serve each key block: one
// computes dV, the other dK and dQ, at the price of computing S twice.
#include "common/dropout.cuh"
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

using problem::kCausal;
using problem::kGeneral;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;  // queries of a step
constexpr int kBlockN = FA_BLOCK_N;  // keys of a thread block
constexpr int kWarps = FA_WARPS;
constexpr int kStages = FA_STAGES;      // of dO; dS and the row statistics have two
constexpr int kQueryStages = FA_Q_STAGES;  // of Q; with three, dK is computed after the barrier of the step
constexpr bool kSplit = FA_SPLIT;
constexpr bool kBf16 = FA_BF16;

constexpr int kThreads = kWarps * 32;
constexpr int kQueryTiles = kBlockM / 8;
constexpr int kDimTiles = kHeadDim / 8;
constexpr float kLog2e = 1.4426950408889634074f;
static_assert(kBlockN == 16 * kWarps, "a warp owns 16 keys");
static_assert((kStages == 1 || kStages == 2) && (kQueryStages == 2 || kQueryStages == 3));
static_assert(kQueryTiles * 4 <= 32 || !kGeneral, "what dropout keeps of a step is one word");

// dQ of a step, kBlockM x kHeadDim, is split over the warps in pieces of 32 or 16 rows, and a warp's piece into passes
// of a few columns, which is all of it that is in registers at a time.
constexpr bool kDqWide = kHeadDim % (16 * (kWarps * 32 / kBlockM)) == 0;
constexpr int kDqRowTiles = kDqWide ? 2 : 1;
constexpr int kDqRowWarps = kBlockM / (16 * kDqRowTiles);
constexpr int kDqColumnWarps = kWarps / kDqRowWarps;
constexpr int kDqColumns = kHeadDim / kDqColumnWarps;
constexpr int kDqPass = kDqColumns % 48 == 0 ? 48 : kDqColumns % 32 == 0 ? 32 : 16;
constexpr int kDqPassTiles = kDqPass / 8;
constexpr int kDqPasses = kDqColumns / kDqPass;
static_assert(kDqRowWarps * kDqColumnWarps == kWarps && kDqPasses * kDqPass * kDqColumnWarps == kHeadDim);

using KeyCopy = tile::Copy<kBlockN, kHeadDim, kThreads>;
using QueryCopy = tile::Copy<kBlockM, kHeadDim, kThreads>;

constexpr int kScorePanels = (kBlockM + tile::kPanelColumns - 1) / tile::kPanelColumns;
constexpr int kScorePanelBytes = kBlockN * tile::kRowBytes;
constexpr int kScoreBytes = kScorePanels * kScorePanelBytes;
constexpr int kRowStatBytes = kBlockM * 4;
static_assert(2 * KeyCopy::kBytes + (kQueryStages + kStages) * QueryCopy::kBytes + 2 * kScoreBytes + 4 * kRowStatBytes ==
                  FA_SMEM_BYTES,
              "kernels.toml: smem of bwd");

extern __shared__ __align__(1024) char shared_memory[];

// The first of sequence `batch`'s tiles of kBlockM rows, in the workspaces.
__device__ __forceinline__ long long first_tile(const flash_attn::BwdParams& p, int batch, int head) {
  const int* const cu_seqlens = p.sequences.cu_seqlens_q;
  return static_cast<long long>(head) * p.total_tiles +
         (cu_seqlens != nullptr ? cu_seqlens[batch] / kBlockM + batch : batch * p.blocks_m);
}

// Place of a thread's four floats, row tile `i` and column tile `j` of a pass, in a dQ tile of dq_accum.
__device__ __forceinline__ int dq_offset(int warp, int pass, int i, int j, int lane) {
  return (((warp * kDqPasses + pass) * kDqRowTiles * kDqPassTiles + i * kDqPassTiles + j) * 32 + lane) * 4;
}

template <int kTiles>
__device__ __forceinline__ void zero(float (&tiles)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) tiles[i][e] = 0.0f;
  }
}

// d[16 keys x kBlockM queries] += A B^T: A is 16 rows of a key tile, B all rows of a query tile, both kHeadDim wide.
__device__ __forceinline__ void multiply_transposed(float (&d)[kQueryTiles][4], const tile::Fragment<true>& a_fragment,
                                                    const tile::Fragment<false>& b_fragment) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    unsigned a[4];
    ptx::ldmatrix_x4(a, a_fragment.at<kBlockN>(0, step));
#pragma unroll
    for (int j = 0; j < kQueryTiles / 2; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4(b, b_fragment.at<kBlockM>(16 * j, step));
      ptx::mma_16816<kBf16>(d[2 * j], a, b[0], b[1]);
      ptx::mma_16816<kBf16>(d[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// d[16 keys x kHeadDim] += A B: A is a keys-by-queries accumulator, rounded to 16 bit, B a query tile.
__device__ __forceinline__ void multiply_registers(float (&d)[kDimTiles][4], const float (&scores)[kQueryTiles][4],
                                                   const tile::Fragment<true>& b_fragment) {
#pragma unroll
  for (int step = 0; step < kQueryTiles / 2; ++step) {
    const float(&left)[4] = scores[2 * step];
    const float(&right)[4] = scores[2 * step + 1];
    const unsigned a[4] = {ptx::pack<kBf16>(left[0], left[1]), ptx::pack<kBf16>(left[2], left[3]),
                           ptx::pack<kBf16>(right[0], right[1]), ptx::pack<kBf16>(right[2], right[3])};
#pragma unroll
    for (int j = 0; j < kDimTiles / 2; ++j) {
      unsigned b[4];
      ptx::ldmatrix_x4_trans(b, b_fragment.at<kBlockM>(16 * step, j));
      ptx::mma_16816<kBf16>(d[2 * j], a, b[0], b[1]);
      ptx::mma_16816<kBf16>(d[2 * j + 1], a, b[2], b[3]);
    }
  }
}

// Rounds a warp's 16 keys of dK or dV to 16 bit and writes them to a key tile in shared memory.
__device__ __forceinline__ void store_rows(unsigned key_tile, const float (&d)[kDimTiles][4], int row, int lane,
                                           float factor) {
#pragma unroll
  for (int j = 0; j < kDimTiles; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::store_shared(key_tile + j / 8 * KeyCopy::kPanelBytes +
                            tile::swizzled(row + half * 8 + lane / 4, j % 8) + lane % 4 * 4,
                        ptx::pack<kBf16>(d[j][2 * half] * factor, d[j][2 * half + 1] * factor));
    }
  }
}

// What a step's score modifiers leave behind for the gradients.
struct Modified {
  float gate[kGeneral ? kQueryTiles : 1][4];  // derivative of softcap
  unsigned dropped;                           // bit 4 j + e: dropout drops element (j, e)
};

// The general kernel's scores: raw ones become scores in base 2, hidden ones -inf. Elements are (key, query):
// this thread's first of each are given.
__device__ __forceinline__ void modify_scores(float (&s)[kQueryTiles][4], Modified& modified,
                                              const flash_attn::BwdParams& p, const problem::Mask& mask, int batch,
                                              int head, int key, int query, bool masked) {
  const flash_attn::ScoreModifiers& m = p.modifiers;
  const bool capped = m.softcap > 0.0f;
  const float in = capped ? p.scale / m.softcap : 0.0f;
  const float out = m.softcap * kLog2e;
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (capped) {
        const float t = ptx::tanh(s[j][e] * in);
        s[j][e] = t * out;
        modified.gate[j][e] = 1.0f - t * t;
      } else {
        s[j][e] *= p.scale_log2;
        modified.gate[j][e] = 1.0f;
      }
    }
  }
  if (m.alibi_slopes != nullptr) {
    const float slope = m.alibi_slopes[batch * m.alibi_batch_stride + head] * kLog2e;
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int distance = query + 8 * j + e % 2 + mask.shift - (key + e / 2 * 8);
        s[j][e] -= slope * fabsf(static_cast<float>(distance));
      }
    }
  }
  if (masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = key + 8 * half < mask.seqlen_k;
      const int first = exists ? mask.first_query(key + 8 * half) - query : kBlockM;
      const int last = mask.last_query(key + 8 * half) - query;
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j) {
        if (8 * j < first || 8 * j > last) s[j][2 * half] = ptx::kMinusInfinity;
        if (8 * j + 1 < first || 8 * j + 1 > last) s[j][2 * half + 1] = ptx::kMinusInfinity;
      }
    }
  }
  modified.dropped = 0;
  if (m.rng_state != nullptr) {
    const dropout::Generator generator(m.rng_state, batch, head, p.heads);
    const unsigned columns[2] = {generator.column(key), generator.column(key + 8)};
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
      const unsigned rows[2] = {generator.row(query + 8 * j), generator.row(query + 8 * j + 1)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool drop = dropout::random(rows[e % 2], columns[e / 2]) < m.drop_threshold;
        modified.dropped |= static_cast<unsigned>(drop) << (4 * j + e);
      }
    }
  }
}

// One thread block's work. kValue: it computes dV. kKey: it computes dK and dQ.
template <bool kValue, bool kKey>
__device__ __forceinline__ void walk(const flash_attn::BwdParams& p, int index) {
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;

  // Key blocks of a head are neighbours, so that its Q and dO stay in L2; under a causal mask the first are the longest.
  const int head_index = index / p.blocks_n;
  const int block_n = index - head_index * p.blocks_n;
  const int batch = head_index / p.heads_kv;
  const int head_kv = head_index - batch * p.heads_kv;
  const int first_key = block_n * kBlockN;
  const problem::Sequence sequence(p, batch);
  const problem::Mask mask(sequence, p.modifiers);
  const int keys = sequence.seqlen_k - first_key;  // of this block that exist, if fewer than kBlockN
  if (keys <= 0) return;

  // Query blocks [first_m, last_m) see a key of this block.
  const int last_query = min(sequence.seqlen_q - 1, mask.last_query(first_key + kBlockN - 1));
  // Not past the tiles that the host has made room for, should max_seqlen_q be too small.
  const int last_m = min(p.blocks_m, last_query < 0 ? 0 : last_query / kBlockM + 1);
  const int first_m = max(0, mask.first_query(first_key)) / kBlockM;
  const int steps = max(0, last_m - first_m) * p.group;

  const unsigned shared_k = ptx::shared_address(shared_memory);
  const unsigned shared_v = shared_k + KeyCopy::kBytes;
  const unsigned shared_q = shared_v + KeyCopy::kBytes;
  const unsigned shared_do = shared_q + kQueryStages * QueryCopy::kBytes;
  const unsigned shared_ds = shared_do + kStages * QueryCopy::kBytes;
  const unsigned shared_lse = shared_ds + 2 * kScoreBytes;  // then delta, per stage
  const KeyCopy key_copy(thread);
  const QueryCopy query_copy(thread);

  // The walk: the queries of every head of the group. `next` runs ahead of the arithmetic.
  struct Position {
    int head, m;
  };
  auto advance = [&](Position& position) {
    if (++position.m == last_m) {
      position.m = first_m;
      ++position.head;
    }
  };
  auto load_q = [&](int buffer, int stage, const Position& at) {
    const int row = at.m * kBlockM;
    query_copy.load<true>(
        shared_q + buffer * QueryCopy::kBytes,
        tile::source(p.q, p.q_stride, batch, at.head, sequence.q_row + row + query_copy.row, thread),
        2 * p.q_stride.row, p.head_dim, sequence.seqlen_q - row);
    // Row statistics are padded to whole blocks: no test.
    if (thread < kBlockM / 2) {
      const bool is_delta = thread >= kBlockM / 4;
      const int i = thread % (kBlockM / 4) * 4;
      const float* const source =
          (is_delta ? p.delta : p.lse_log2) + (first_tile(p, batch, at.head) + at.m) * kBlockM + i;
      ptx::cp_async_16(shared_lse + (2 * stage + is_delta) * kRowStatBytes + i * 4, source);
    }
  };
  auto load_do = [&](int stage, const Position& at) {
    const int row = at.m * kBlockM;
    query_copy.load<true>(
        shared_do + stage * QueryCopy::kBytes,
        tile::source(p.dout, p.dout_stride, batch, at.head, sequence.q_row + row + query_copy.row, thread),
        2 * p.dout_stride.row, p.head_dim_v, sequence.seqlen_q - row);
  };

  float dk[kKey ? kDimTiles : 1][4];
  float dv[kValue ? kDimTiles : 1][4];
  zero(dk);
  zero(dv);

  Position current{head_kv * p.group, first_m};
  Position next = current;
  if (steps > 0) {
    const long long row = sequence.k_row + first_key + key_copy.row;
    key_copy.load<true>(shared_k, tile::source(p.k, p.k_stride, batch, head_kv, row, thread), 2 * p.k_stride.row,
                        p.head_dim, keys);
    if constexpr (kKey) {
      key_copy.load<true>(shared_v, tile::source(p.v, p.v_stride, batch, head_kv, row, thread), 2 * p.v_stride.row,
                          p.head_dim_v, keys);
    }
    load_q(0, 0, next);
    load_do(0, next);
    ptx::cp_async_commit();
    advance(next);
    if (steps > 1) {
      load_q(1, 1, next);
      if constexpr (kStages == 2) load_do(1, next);
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
  }

  const tile::Fragment<true> k_rows(shared_k + warp * 16 * tile::kRowBytes, lane);
  const tile::Fragment<true> v_rows(shared_v + warp * 16 * tile::kRowBytes, lane);
  const int key = warp * 16 + lane / 4;
  const int dq_chunk = warp % kDqRowWarps * 2 * kDqRowTiles;  // first 16-byte chunk of this warp's dQ rows in dS
  const int dq_column = warp / kDqRowWarps * kDqColumns / 8;  // and of its columns in K

  int buffer = 0;  // of Q
  for (int step = 0; step < steps; ++step) {
    const int stage = step & 1;
    const unsigned q_tile = shared_q + buffer * QueryCopy::kBytes;
    const unsigned do_tile = shared_do + (kStages == 2 ? stage : 0) * QueryCopy::kBytes;
    const unsigned ds_tile = shared_ds + stage * kScoreBytes;
    const unsigned lse_address = shared_lse + 2 * stage * kRowStatBytes + lane % 4 * 8;
    const int first_row = current.m * kBlockM;

    float s[kQueryTiles][4];
    zero(s);
    multiply_transposed(s, k_rows, tile::Fragment<false>(q_tile, lane));
    Modified modified;
    if constexpr (kGeneral) {
      const bool masked = keys < kBlockN || mask.last(first_row) < first_key + kBlockN - 1 ||
                          mask.first(first_row + kBlockM - 1) > first_key;
      modify_scores(s, modified, p, mask, batch, current.head, first_key + key, first_row + lane % 4 * 2, masked);
    } else if (keys < kBlockN || (kCausal && mask.last(first_row) < first_key + kBlockN - 1)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = first_row + lane % 4 * 2;
        const int first = key + 8 * half < keys ? mask.first_query(first_key + key + 8 * half) - query : kBlockM;
#pragma unroll
        for (int j = 0; j < kQueryTiles; ++j) {
          if (8 * j < first) s[j][2 * half] = ptx::kMinusInfinity;
          if (8 * j + 1 < first) s[j][2 * half + 1] = ptx::kMinusInfinity;
        }
      }
    }
    const float scale_log2 = kGeneral ? 1.0f : p.scale_log2;
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j) {
      const float2 lse = ptx::load_shared_float2(lse_address + j * 32);
      s[j][0] = ptx::exp2(fmaf(s[j][0], scale_log2, -lse.x));
      s[j][1] = ptx::exp2(fmaf(s[j][1], scale_log2, -lse.y));
      s[j][2] = ptx::exp2(fmaf(s[j][2], scale_log2, -lse.x));
      s[j][3] = ptx::exp2(fmaf(s[j][3], scale_log2, -lse.y));
    }

    if constexpr (kStages == 1) {
      // dO of this step has arrived.
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
    // The accumulators of dP start at -delta, so that dS = P (dP - delta) is one product; not so where dropout scales dP.
    float ds[kKey ? kQueryTiles : 1][4];
    if constexpr (kKey) {
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j) {
        const float2 delta = ptx::load_shared_float2(lse_address + kRowStatBytes + j * 32);
        ds[j][0] = ds[j][2] = kGeneral ? 0.0f : -delta.x;
        ds[j][1] = ds[j][3] = kGeneral ? 0.0f : -delta.y;
      }
      multiply_transposed(ds, v_rows, tile::Fragment<false>(do_tile, lane));
    }
    if constexpr (kGeneral && kKey) {
      const float keep_scale = p.modifiers.rng_state != nullptr ? p.modifiers.keep_scale : 1.0f;
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j) {
        const float2 delta = ptx::load_shared_float2(lse_address + kRowStatBytes + j * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float dp = modified.dropped >> (4 * j + e) & 1 ? 0.0f : ds[j][e] * keep_scale;
          ds[j][e] = s[j][e] * (dp - (e % 2 == 0 ? delta.x : delta.y)) * modified.gate[j][e];
        }
      }
    }
    if constexpr (kGeneral) {
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (modified.dropped >> (4 * j + e) & 1) s[j][e] = 0.0f;
        }
      }
    }
    if constexpr (kValue) multiply_registers(dv, s, tile::Fragment<true>(do_tile, lane));
    if constexpr (kKey) {
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j) {
        if constexpr (!kGeneral) {
#pragma unroll
          for (int e = 0; e < 4; ++e) ds[j][e] *= s[j][e];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::store_shared(ds_tile + j / 8 * kScorePanelBytes + tile::swizzled(key + half * 8, j % 8) + lane % 4 * 4,
                            ptx::pack<kBf16>(ds[j][2 * half], ds[j][2 * half + 1]));
        }
      }
      if constexpr (kQueryStages == 2) multiply_registers(dk, ds, tile::Fragment<true>(q_tile, lane));
    }

    // The one barrier of a step: dS is complete, Q and dO of the next step have arrived, and what the step after that one
    // will overwrite is read for the last time. dS has two stages, so that a warp may run ahead into the next step while
    // others work on dQ.
    ptx::cp_async_wait<0>();
    __syncthreads();
    if constexpr (kStages == 1) {
      if (step + 1 < steps) load_do(0, next);
    }
    advance(next);
    // The buffer for two steps ahead: this step's, or, of three, the one that the step before has left.
    const int next_buffer = kQueryStages == 2 ? buffer : buffer == 0 ? 2 : buffer - 1;
    if (step + 2 < steps) {
      load_q(next_buffer, stage, next);
      if constexpr (kStages == 2) load_do(stage, next);
    }
    ptx::cp_async_commit();
    if constexpr (kKey && kQueryStages == 3) multiply_registers(dk, ds, tile::Fragment<true>(q_tile, lane));
    buffer = buffer + 1 == kQueryStages ? 0 : buffer + 1;

    if constexpr (kKey) {
      const long long dq_tile = first_tile(p, batch, current.head) + current.m;
      float* const accumulator = p.dq_accum + dq_tile * (kBlockM * kHeadDim);
      int* const semaphore = p.dq_semaphore + dq_tile;
#pragma unroll
      for (int pass = 0; pass < kDqPasses; ++pass) {
        float dq[kDqRowTiles][kDqPassTiles][4];
#pragma unroll
        for (int i = 0; i < kDqRowTiles; ++i) zero(dq[i]);
#pragma unroll
        for (int k = 0; k < kBlockN / 16; ++k) {
          unsigned a[kDqRowTiles][4];
#pragma unroll
          for (int i = 0; i < kDqRowTiles; ++i) {
            const int chunk = dq_chunk + 2 * i + (lane >> 3 & 1);
            ptx::ldmatrix_x4_trans(a[i], ds_tile + chunk / 8 * kScorePanelBytes +
                                             tile::swizzled((lane & 7) + (lane >> 4 << 3), chunk % 8) +
                                             k * 16 * tile::kRowBytes);
          }
#pragma unroll
          for (int j = 0; j < kDqPassTiles / 2; ++j) {
            unsigned b[4];
            const int chunk = dq_column + pass * kDqPassTiles + 2 * j + (lane >> 4);
            ptx::ldmatrix_x4_trans(b, shared_k + chunk / 8 * KeyCopy::kPanelBytes +
                                          tile::swizzled(lane & 15, chunk % 8) + k * 16 * tile::kRowBytes);
#pragma unroll
            for (int i = 0; i < kDqRowTiles; ++i) {
              ptx::mma_16816<kBf16>(dq[i][2 * j], a[i], b[0], b[1]);
              ptx::mma_16816<kBf16>(dq[i][2 * j + 1], a[i], b[2], b[3]);
            }
          }
        }
        if (pass == 0 && p.deterministic) {
          // All key blocks before this one have a lower block index. Blocks start in the order of their index, as
          // every lock between thread blocks assumes, so they are running or done: the wait ends.
          const int turn = block_n - max(0, mask.first(first_row)) / kBlockN;
          if (thread == 0) {
            while (ptx::load_acquire(semaphore) != turn) {
            }
          }
          __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < kDqRowTiles; ++i) {
#pragma unroll
          for (int j = 0; j < kDqPassTiles; ++j) {
            ptx::red_add_4(accumulator + dq_offset(warp, pass, i, j, lane), dq[i][j]);
          }
        }
      }
      if (p.deterministic) {
        __threadfence();
        __syncthreads();
        if (thread == 0) ptx::store_release(semaphore, block_n - max(0, mask.first(first_row)) / kBlockN + 1);
      }
    }
    advance(current);
  }

  // dK and dV take the place of K and V.
  ptx::cp_async_wait<0>();
  __syncthreads();
  const float keep_scale = kGeneral && p.modifiers.rng_state != nullptr ? p.modifiers.keep_scale : 1.0f;
  if constexpr (kKey) store_rows(shared_k, dk, warp * 16, lane, p.scale);
  if constexpr (kValue) store_rows(shared_v, dv, warp * 16, lane, keep_scale);
  __syncthreads();
  const long long row = sequence.k_row + first_key + key_copy.row;
  if constexpr (kKey) {
    key_copy.store(shared_k, tile::destination(p.dk, p.dk_stride, batch, head_kv, row, thread), 2 * p.dk_stride.row,
                   p.head_dim, keys);
  }
  if constexpr (kValue) {
    key_copy.store(shared_v, tile::destination(p.dv, p.dv_stride, batch, head_kv, row, thread), 2 * p.dv_stride.row,
                   p.head_dim_v, keys);
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
  const problem::Sequence sequence(p, batch);
  if (block_m * kBlockM >= sequence.seqlen_q) return;
  const QueryCopy copy(thread);
  const long long dq_tile = first_tile(p, batch, head) + block_m;
  const long long lse_row = batch * p.lse_batch_stride + head * p.lse_head_stride + sequence.q_row;

#pragma unroll
  for (int pass = 0; pass < QueryCopy::kPasses; ++pass) {
    const int row_in_block = copy.row + pass * QueryCopy::kRowStep;
    const int row = block_m * kBlockM + row_in_block;
    const bool inside = row < sequence.seqlen_q;
    float sum = 0.0f;
    const char* const out = tile::source(p.out, p.out_stride, batch, head, sequence.q_row + row, thread);
    const char* const dout = tile::source(p.dout, p.dout_stride, batch, head, sequence.q_row + row, thread);
#pragma unroll
    for (int panel = 0; panel < QueryCopy::kPanels; ++panel) {
      if (inside && copy.column + panel * tile::kPanelColumns < p.head_dim_v) {
        const uint4 a = *reinterpret_cast<const uint4*>(out + panel * tile::kRowBytes);
        const uint4 b = *reinterpret_cast<const uint4*>(dout + panel * tile::kRowBytes);
        tile::add_product<kBf16>(sum, a, b);
      }
    }
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (thread % 8 == 0) {
      // Padding rows and rows that see no key get +inf: their probabilities, exp2(s - inf), are 0 without a test.
      const float lse = inside ? p.lse[lse_row + row] : ptx::kMinusInfinity;
      if (inside && p.dlse != nullptr) sum -= p.dlse[lse_row + row];
      // Whatever the gradient of an output that depends on nothing.
      if (lse == ptx::kMinusInfinity) sum = 0.0f;
      p.lse_log2[dq_tile * kBlockM + row_in_block] = lse == ptx::kMinusInfinity ? -ptx::kMinusInfinity : lse * kLog2e;
      p.delta[dq_tile * kBlockM + row_in_block] = sum;
    }
  }

  uint4* const accumulator = reinterpret_cast<uint4*>(p.dq_accum + dq_tile * (kBlockM * kHeadDim));
#pragma unroll 4
  for (int i = thread; i < kBlockM * kHeadDim / 4; i += kThreads) accumulator[i] = make_uint4(0, 0, 0, 0);
  if (thread == 0) p.dq_semaphore[dq_tile] = 0;
}

extern "C" __global__ void __launch_bounds__(kThreads, FA_MIN_BLOCKS)
    flash_bwd(const __grid_constant__ flash_attn::BwdParams p) {
  if constexpr (!kSplit) {
    walk<true, true>(p, blockIdx.x);
  } else if (blockIdx.x % 2 == 0) {
    walk<false, true>(p, blockIdx.x / 2);
  } else {
    walk<true, false>(p, blockIdx.x / 2);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    flash_bwd_postprocess(const __grid_constant__ flash_attn::BwdParams p) {
  __shared__ __align__(1024) char rounded[QueryCopy::kBytes];
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const int head_index = blockIdx.x / p.blocks_m;
  const int block_m = blockIdx.x - head_index * p.blocks_m;
  const int batch = head_index / p.heads;
  const int head = head_index - batch * p.heads;
  const problem::Sequence sequence(p, batch);
  const int rows = sequence.seqlen_q - block_m * kBlockM;
  if (rows <= 0) return;
  const unsigned shared = ptx::shared_address(rounded);
  const float* const accumulator = p.dq_accum + (first_tile(p, batch, head) + block_m) * (kBlockM * kHeadDim);

#pragma unroll
  for (int pass = 0; pass < kDqPasses; ++pass) {
#pragma unroll
    for (int i = 0; i < kDqRowTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kDqPassTiles; ++j) {
        const float4 v = *reinterpret_cast<const float4*>(accumulator + dq_offset(warp, pass, i, j, lane));
        const int row = (warp % kDqRowWarps * kDqRowTiles + i) * 16 + lane / 4;
        const int chunk = warp / kDqRowWarps * kDqColumns / 8 + pass * kDqPassTiles + j;
        const unsigned panel = shared + chunk / 8 * QueryCopy::kPanelBytes;
        ptx::store_shared(panel + tile::swizzled(row, chunk % 8) + lane % 4 * 4,
                          ptx::pack<kBf16>(v.x * p.scale, v.y * p.scale));
        ptx::store_shared(panel + tile::swizzled(row + 8, chunk % 8) + lane % 4 * 4,
                          ptx::pack<kBf16>(v.z * p.scale, v.w * p.scale));
      }
    }
  }
  __syncthreads();
  const QueryCopy copy(thread);
  copy.store(shared,
             tile::destination(p.dq, p.dq_stride, batch, head, sequence.q_row + block_m * kBlockM + copy.row, thread),
             2 * p.dq_stride.row, p.head_dim, rows);
}
