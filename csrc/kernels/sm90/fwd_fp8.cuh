// What the FP8 forward kernels of fwd_fp8.cu and fwd_fp8_turns.cu share: all but the consumers' loop over key blocks.
#pragma once

#include "common/hopper.cuh"
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace fp8 {

using problem::kCausal;
using problem::kGeneral;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;
constexpr int kBlockN = FA_BLOCK_N;
constexpr int kStages = FA_STAGES;
constexpr int kValueColumns = FA_VALUE_COLUMNS;  // of one product P V
constexpr int kValueBuffers = FA_VALUE_BUFFERS;  // products under way at a time

constexpr int kConsumers = kBlockM / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kConsumers == 2 || kConsumers == 3, "setmaxnreg");
static_assert(kStages <= 4, "Barriers");
static_assert(kThreads == FA_WARPS * 32 && kConsumers * 64 == kBlockM && kBlockN % 32 == 0);

constexpr int kScores = kBlockN / 2;  // of a thread: 2 rows, kBlockN / 4 columns
constexpr int kOutputs = kHeadDim / 2;
constexpr int kSteps = kBlockN / 32;  // products of 32 keys
constexpr float kHeadroom = 5.0f;
constexpr float kLargest = 448.0f;  // of e4m3
constexpr int kParts = kGeneral ? kBlockN / flash_attn::kDescaleRows : 1;  // of a key block, each with factors of its own
constexpr int kPartColumns = kBlockN / kParts;
constexpr float kSmallestFactor = 7.888609052210118e-31f;  // 2^-100, of V: its reciprocal times many P is finite
constexpr float kSmallestScale = 1.1754943508222875e-38f;  // the smallest normal float32: scores are about 0
static_assert(!kGeneral || kPartColumns == flash_attn::kDescaleRows && kBlockM % flash_attn::kDescaleRows == 0);
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;

// Q and K: panels of 128 columns in the 128-byte swizzle, or one of 64 in the 64-byte swizzle.
constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;
constexpr int kPanels = kHeadDim / kRowBytes;
constexpr int kQueryPanel = kBlockM * kRowBytes;
constexpr int kKeyPanel = kBlockN * kRowBytes;
constexpr int kQueryBytes = kBlockM * kHeadDim;
constexpr int kKeyBytes = kBlockN * kHeadDim;  // of a tile of K, or of V
static_assert(kHeadDim == 64 || kHeadDim % 128 == 0);

// V: for each 32 keys kHeadDim columns, in core matrices of 8 columns by 16 keys.
constexpr int kValueStep = 32 * kHeadDim;
constexpr int kValueChunks = kHeadDim / kValueColumns;
constexpr int kTransposers = flash_attn::fp8_transposers(kBlockN, kHeadDim);  // threads of flash_transpose_v
static_assert(kHeadDim % kValueColumns == 0 && kValueBuffers <= kValueChunks && kValueBuffers <= 2);

constexpr int kOutputPanel = kBlockM * tile::kRowBytes;
constexpr int kOutputBytes = kBlockM * kHeadDim * 2;
constexpr int kBarrierBytes = 1024;
static_assert(kOutputBytes + kQueryBytes + 2 * kStages * kKeyBytes + kBarrierBytes == FA_SMEM_BYTES,
              "kernels.toml: smem of fwd");

using ScoreProduct = hopper::WgmmaE4m3<kBlockN>;
using OutputProduct = hopper::WgmmaE4m3<kValueColumns>;

extern __shared__ __align__(1024) char shared_memory[];

// Barriers, 8 bytes each.
struct Barriers {
  unsigned base;
  __device__ __forceinline__ unsigned q_full() const { return base; }
  __device__ __forceinline__ unsigned q_empty() const { return base + 8; }
  __device__ __forceinline__ unsigned k_full(int s) const { return base + 16 + 8 * s; }
  __device__ __forceinline__ unsigned k_empty(int s) const { return base + 48 + 8 * s; }
  __device__ __forceinline__ unsigned v_full(int s) const { return base + 80 + 8 * s; }
  __device__ __forceinline__ unsigned v_empty(int s) const { return base + 112 + 8 * s; }
  __device__ __forceinline__ unsigned zero() const { return base + 144; }  // a float
};

// Whether later tiles of a head have more keys.
__device__ __forceinline__ bool tiles_grow(const flash_attn::FwdTmaParams& tma) {
  if constexpr (!kGeneral) return kCausal;
  const flash_attn::FwdParams& p = tma.fwd;
  const flash_attn::ScoreModifiers& m = p.modifiers;
  return tma.heads_per_group > 1 && m.chunk == 0 && m.window_left >= p.seqlen_k - 1 && m.window_right < p.seqlen_q - 1;
}

// The order of the tiles: heads in groups whose K and V stay in L2; in a group the longest tiles of all heads come first.
// Every other round is dealt in reverse, so that each thread block gets its share of long and short ones.
struct Tile {
  int head_index, block;

  __device__ __forceinline__ Tile(const flash_attn::FwdTmaParams& p, int round) {
    const int place = round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int index = round * static_cast<int>(gridDim.x) + place;
    const int total = p.fwd.batch * p.fwd.heads;
    if (!tiles_grow(p)) {
      head_index = index / p.fwd.blocks_m;
      block = index - head_index * p.fwd.blocks_m;
    } else {
      const int per_group = p.heads_per_group * p.fwd.blocks_m;
      const int group = index / per_group;
      const int heads = max(1, min(p.heads_per_group, total - group * p.heads_per_group));
      const int rank = (index - group * per_group) / heads;
      head_index = group * p.heads_per_group + (index - group * per_group) - rank * heads;
      block = p.fwd.blocks_m - 1 - rank;
    }
  }

  __device__ __forceinline__ bool exists(const flash_attn::FwdTmaParams& p) const {
    return block >= 0 && head_index < p.fwd.batch * p.fwd.heads;
  }
};

// Keys of a sequence that left padding skips, and by how many of them key blocks begin before the first that counts: such
// that they begin where blocks of factors do.
__device__ __forceinline__ int padding_of(const flash_attn::FwdParams& p, int batch) {
  return kGeneral && p.sequences.leftpad_k != nullptr ? max(0, p.sequences.leftpad_k[batch]) : 0;
}

__device__ __forceinline__ int skew_of(const flash_attn::FwdParams& p, const problem::Sequence& sequence, int batch) {
  return sequence.seqlen_k > 0 ? padding_of(p, batch) % flash_attn::kDescaleRows : 0;
}

// One tile of work: kBlockM queries of a head.
struct Work {
  int batch, head, first_row;
  problem::Sequence sequence;
  problem::Mask mask;
  int first, last;            // key blocks [first, last) hold visible keys
  int full_first, full_last;  // of these, [full_first, full_last) need no mask
  int skew;                   // keys of key block 0 before the first that counts

  __device__ __forceinline__ Work(const flash_attn::FwdParams& p, const Tile& place)
      : batch(place.head_index / p.heads),
        head(place.head_index - batch * p.heads),
        first_row(place.block * kBlockM),
        sequence(p, batch),
        mask(sequence, p.modifiers) {
    const int last_row = min(first_row + kBlockM, sequence.seqlen_q) - 1;
    skew = skew_of(p, sequence, batch);
    const int seen = mask.last(last_row) + 1;
    last = max(0, kGeneral && seen <= 0 ? 0 : seen + skew + kBlockN - 1) / kBlockN;
    full_last = max(0, mask.last(first_row) + skew + 1) / kBlockN;
    first = kGeneral ? (mask.first(first_row) + skew) / kBlockN : 0;
    full_first = kGeneral ? (mask.first(last_row) + skew + kBlockN - 1) / kBlockN : 0;
  }

  __device__ __forceinline__ bool empty() const { return last <= first; }
};

// Where tile 0 of a sequence's values lies in the workspace; see FwdFp8Params.
__device__ __forceinline__ char* value_tiles(const flash_attn::FwdFp8Params& p, int batch, int head_kv) {
  const int* const cu_seqlens_k = p.tma.fwd.sequences.cu_seqlens_k;
  const int first = cu_seqlens_k != nullptr ? cu_seqlens_k[batch] / kBlockN + batch : batch * p.blocks_n;
  return static_cast<char*>(p.v_tiles) +
         (static_cast<long long>(head_kv) * p.v_tiles_of_head + first) * kKeyBytes;
}

__device__ __forceinline__ float factor_of(const flash_attn::Descale& descale, int batch, int head_kv) {
  return descale.data == nullptr ? 1.0f : descale.data[batch * descale.batch + head_kv * descale.head];
}

// Where the factors for blocks of rows of one head of a sequence are.
struct RowFactors {
  int first;  // of `skipped` rows after the sequence's first
  int last;   // of those that count; of later ones there may be none

  // `rows` of the sequence count after those that are skipped; `blocks`: of a head.
  __device__ __forceinline__ RowFactors(const int* cu_seqlens, int batch, int head, int heads, int blocks, int skipped,
                                        int rows) {
    const int start = cu_seqlens != nullptr ? cu_seqlens[batch] / flash_attn::kDescaleRows + batch : batch * heads * blocks;
    first = start + head * blocks + skipped / flash_attn::kDescaleRows;
    last = first + max(0, rows - 1) / flash_attn::kDescaleRows;
  }
  __device__ __forceinline__ float at(const flash_attn::Descale& descale, int block) const {
    return __ldg(descale.data + min(first + block, last));
  }
};

// What raw scores are multiplied by, positive even where a factor is 0, so that a hidden one stays minus infinity. NaN stays.
__device__ __forceinline__ float positive_scale(float scale) { return scale < kSmallestScale ? kSmallestScale : scale; }

// What goes into the softmax of a key block, by its parts.
struct Factors {
  float score[kParts];  // what raw scores are multiplied by
  float bias[kParts];   // log2 of V's, where they are of blocks; else 0
};

__device__ __forceinline__ void produce(const flash_attn::FwdFp8Params& params, const Barriers& barriers,
                                        unsigned shared_q, unsigned shared_k, unsigned shared_v, int rounds) {
  const flash_attn::FwdTmaParams& p = params.tma;
  hopper::Ring<kStages> k_ring, v_ring;
  int q_phase = 0;
  ptx::wait_on_dependencies();  // flash_transpose_v, whose ordinary stores are read by bulk copies
  hopper::fence_proxy_async_global();
  for (int round = 0; round < rounds; ++round) {
    const Tile next(p, round);
    if (!next.exists(p)) break;
    const Work work(p.fwd, next);
    if (work.first_row >= work.sequence.seqlen_q || work.empty()) continue;
    const int head_kv = work.head / p.fwd.group;
    const char* const values = value_tiles(params, work.batch, head_kv);
    auto load_k = [&](int n) {
      const unsigned full = barriers.k_full(k_ring.stage);
      hopper::barrier_wait(barriers.k_empty(k_ring.stage), k_ring.phase ^ 1);
      hopper::barrier_expect_bytes(full, kKeyBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        hopper::load_box(shared_k + k_ring.stage * kKeyBytes + panel * kKeyPanel, p.k_map, full, panel * kRowBytes,
                         static_cast<int>(work.sequence.k_row) - work.skew + n * kBlockN, head_kv,
                         p.fwd.sequences.cu_seqlens_k != nullptr ? 0 : work.batch);
      }
      k_ring.advance();
    };
    auto load_v = [&](int n) {
      const unsigned full = barriers.v_full(v_ring.stage);
      hopper::barrier_wait(barriers.v_empty(v_ring.stage), v_ring.phase ^ 1);
      hopper::barrier_expect_bytes(full, kKeyBytes);
      hopper::load_bytes(shared_v + v_ring.stage * kKeyBytes, values + static_cast<long long>(n) * kKeyBytes, kKeyBytes,
                         full);
      v_ring.advance();
    };
    load_k(work.last - 1);
    hopper::barrier_wait(barriers.q_empty(), q_phase ^ 1);
    hopper::barrier_expect_bytes(barriers.q_full(), kQueryBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      hopper::load_box(shared_q + panel * kQueryPanel, p.q_map, barriers.q_full(), panel * kRowBytes,
                       static_cast<int>(work.sequence.q_row) + work.first_row, work.head,
                       p.fwd.sequences.cu_seqlens_q != nullptr ? 0 : work.batch);
    }
    q_phase ^= 1;
    for (int n = work.last - 1; n > work.first; --n) {
      load_k(n - 1);
      load_v(n);
    }
    load_v(work.first);
  }
}

__device__ __forceinline__ unsigned long long operand(unsigned address) {
  return kRowBytes == 64 ? hopper::descriptor_k_major_64(address) : hopper::descriptor_k_major(address);
}

// S = Q K^T of this warpgroup's 64 rows, `k`: the operand of a tile of K; not waited for.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores], unsigned q_tile, unsigned long long k) {
  constexpr int kPanelSteps = kRowBytes / 32;
  const unsigned long long q = operand(q_tile);
#pragma unroll
  for (int step = 0; step < kHeadDim / 32; ++step) {
    const int panel = step / kPanelSteps, column = step % kPanelSteps * 32;
    ScoreProduct::shared(s, hopper::descriptor_after(q, panel * kQueryPanel + column),
                         hopper::descriptor_after(k, panel * kKeyPanel + column), step > 0);
  }
  hopper::wgmma_commit();
}

// Steps [kFirst, kLast) of P V of the columns of chunk `chunk`; not waited for.
template <int kFirst, int kLast>
__device__ __forceinline__ void multiply_values(float (&values)[kValueColumns / 2],
                                                const unsigned (&probabilities)[kSteps][4], unsigned v_tile,
                                                int chunk) {
  const unsigned long long v = hopper::descriptor_core_matrices(v_tile);
#pragma unroll
  for (int step = kFirst; step < kLast; ++step) {
    OutputProduct::registers(values, probabilities[step],
                             hopper::descriptor_after(v, step * kValueStep + chunk * kValueColumns * 32), step > 0);
  }
  hopper::wgmma_commit();
}

// The end of a consumer's turn, where turns are taken: `probability` is more than -1. It keeps the compiler from ending the turn
// before that is known.
__device__ __forceinline__ void give_turn(int group, float probability) {
  asm volatile(
      "{\n.reg .pred known;\n"
      "setp.gtu.f32 known, %0, 0fBF800000;\n"
      "@known barrier.cta.arrive %1, 256;\n}" ::"f"(probability),
      "r"(2 - group)
      : "memory");
}

// By how much the base of a row is raised for a block of scores, relative to the base: larger(j) is the largest that this thread has
// of the row's columns 8 j to 8 j + 7. `factor`: what sums so far must be scaled by.
template <typename Larger>
__device__ __forceinline__ float raise_row(Larger larger, float& base, float& factor) {
  // Two chains, so that a maximum does not wait for the one before it.
  float even = larger(0);
  float odd = larger(1);
#pragma unroll
  for (int j = 2; j < kBlockN / 8; j += 2) {
    even = fmaxf(even, larger(j));
    odd = fmaxf(odd, larger(j + 1));
  }
  float m = fmaxf(even, odd);
  m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
  m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
  const bool unset = base == ptx::kMinusInfinity;
  float up = m - kHeadroom;
  if (!unset) up = fmaxf(up, 0.0f);
  factor = unset ? 0.0f : ptx::exp2(-up);
  base = unset ? up : base + up;
  return up;
}

__device__ __forceinline__ void apply_mask(float (&s)[kScores], const problem::Mask& mask, int row, int key) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int last = mask.last(row + 8 * half) - key;
    const int first = mask.first(row + 8 * half) - key;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      if (8 * j > last || (kGeneral && 8 * j < first)) s[4 * j + 2 * half] = ptx::kMinusInfinity;
      if (8 * j + 1 > last || (kGeneral && 8 * j + 1 < first)) s[4 * j + 2 * half + 1] = ptx::kMinusInfinity;
    }
  }
}

// The output and lse of a consumer's rows, from what they sum up to at these bases. `row_sum`: this thread's part; `my_row`: the
// first of its two rows of the tile, which has `rows`.
__device__ __forceinline__ void write_rows(const flash_attn::FwdFp8Params& params, const Work& work,
                                           const float (&out)[kOutputs], float (&base)[2], const float (&row_sum)[2],
                                           unsigned shared_out, int group, int warp, int lane, int my_row, int rows) {
  const flash_attn::FwdParams& p = params.tma.fwd;
  float sink = ptx::kMinusInfinity;  // one more logit of each row, with no value behind it
  if (kGeneral && p.modifiers.sink != nullptr) sink = p.modifiers.sink[work.head] * kLog2e;
  const float v_descale = kGeneral && params.v_descale.blocks > 0
                              ? 1.0f
                              : factor_of(params.v_descale, work.batch, work.head / p.group);
  const bool has_mean = params.v_mean != nullptr;
  const float* const v_mean =
      params.v_mean + (static_cast<long long>(work.batch) * p.heads_kv + work.head / p.group) * kHeadDim + lane % 4 * 2;
  float* const lse =
      p.lse + work.batch * p.lse_batch_stride + work.head * p.lse_head_stride + work.sequence.q_row + work.first_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    float scale = v_descale;
    if constexpr (kGeneral) {
      const float m = fmaxf(base[half], sink);
      if (m != ptx::kMinusInfinity) {
        const float down = ptx::exp2(base[half] - m);
        scale *= down;
        sum = fmaf(sum, down, ptx::exp2(sink - m));
      }
      base[half] = m;
    }
    const int row = my_row + 8 * half;
    const float inverse = sum == 0.0f ? 0.0f : scale / sum;
    if (lane % 4 == 0 && row < rows) {
      lse[row] = sum == 0.0f ? ptx::kMinusInfinity : (base[half] + ptx::log2(sum)) * kLn2;
    }
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      float2 o = make_float2(out[4 * j + 2 * half] * inverse, out[4 * j + 2 * half + 1] * inverse);
      if (has_mean && sum != 0.0f) {
        const float2 mean = *reinterpret_cast<const float2*>(v_mean + 8 * j);
        o.x += mean.x;
        o.y += mean.y;
      }
      ptx::store_shared(shared_out + j / 8 * kOutputPanel + tile::swizzled(row, j % 8) + lane % 4 * 4,
                        ptx::pack<true>(o.x, o.y));
    }
  }
  __syncwarp();
  // 8 lanes write the 128 bytes of a panel row; a warp four rows at a time.
#pragma unroll
  for (int pass = 0; pass < 4; ++pass) {
    const int row = group * 64 + warp * 16 + pass * 4 + lane / 8;
#pragma unroll
    for (int panel = 0; panel < kHeadDim / 64; ++panel) {
      if (row < rows && panel * 64 + lane % 8 * 8 < p.head_dim_v) {
        char* const destination = tile::destination(p.out, p.out_stride, work.batch, work.head,
                                                    work.sequence.q_row + work.first_row + row, lane);
        *reinterpret_cast<uint4*>(destination + panel * tile::kRowBytes) =
            ptx::load_shared_16(shared_out + panel * kOutputPanel + tile::swizzled(row, lane % 8));
      }
    }
  }
  __syncwarp();
}

// What one of kConsumers warpgroups does.
__device__ __forceinline__ void consume(const flash_attn::FwdFp8Params& params, const Barriers& barriers, unsigned shared_out,
                        unsigned shared_q, unsigned shared_k, unsigned shared_v, int rounds);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_fwd(const __grid_constant__ flash_attn::FwdFp8Params p) {
  const unsigned shared_out = ptx::shared_address(shared_memory);
  const unsigned shared_q = shared_out + kOutputBytes;
  const unsigned shared_k = shared_q + kQueryBytes;
  const unsigned shared_v = shared_k + kStages * kKeyBytes;
  const Barriers barriers{shared_v + kStages * kKeyBytes};
  const int tiles = p.tma.fwd.blocks_m * p.tma.fwd.heads * p.tma.fwd.batch;
  const int rounds = (tiles + gridDim.x - 1) / gridDim.x;
  if (threadIdx.x == 0) {
    hopper::barrier_init(barriers.q_full(), 1);
    hopper::barrier_init(barriers.q_empty(), 4 * kConsumers);
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(barriers.k_full(stage), 1);
      hopper::barrier_init(barriers.v_full(stage), 1);
      hopper::barrier_init(barriers.k_empty(stage), 4 * kConsumers);
      hopper::barrier_init(barriers.v_empty(stage), 4 * kConsumers);
    }
    ptx::store_shared(barriers.zero(), 0);
    hopper::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    hopper::give_registers<kConsumers == 3 ? 32 : 24>();
    if (threadIdx.x == 0) {
      hopper::prefetch_map(p.tma.q_map);
      hopper::prefetch_map(p.tma.k_map);
      produce(p, barriers, shared_q, shared_k, shared_v, rounds);
    }
  } else {
    hopper::take_registers<kConsumers == 3 ? 160 : 240>();
    consume(p, barriers, shared_out, shared_q, shared_k, shared_v, rounds);
  }
}

// Writes one tile of V for flash_fwd. A core matrix holds, for each of 8 columns, 16 keys h to h + 15 in the order in
// which lane t of four has them in an accumulator: h + 2t, h + 2t + 1, h + 8 + 2t, h + 9 + 2t.
extern "C" __global__ void __launch_bounds__(kTransposers)
    flash_transpose_v(const __grid_constant__ flash_attn::FwdFp8Params params) {
  __shared__ __align__(16) uint4 shared_tile[kKeyBytes / 16];
  const flash_attn::FwdParams& p = params.tma.fwd;
  ptx::launch_dependents();
  const int n = blockIdx.x % params.blocks_n;
  const int head_kv = blockIdx.x / params.blocks_n % p.heads_kv;
  const int batch = blockIdx.x / params.blocks_n / p.heads_kv;
  const problem::Sequence sequence(p, batch);
  const int skew = skew_of(p, sequence, batch);
  const int keys = sequence.seqlen_k + skew - n * kBlockN;
  if (keys <= 0) return;
  const int first_key = skew - n * kBlockN;

  const char* const values = static_cast<const char*>(p.v) + batch * p.v_stride.batch + head_kv * p.v_stride.head +
                             (sequence.k_row - skew + n * kBlockN) * p.v_stride.row;
  // In chunks of 16 bytes: 32 keys have 2 kHeadDim of them, 8 columns 16, and 8 of these are the first 16 keys. In
  // shared memory a chunk's place among 8 is turned by its columns, so that a warp's threads write to different banks.
  auto place = [](int chunk) { return chunk ^ chunk / 16 % 8; };
  unsigned* const words = reinterpret_cast<unsigned*>(shared_tile);
  constexpr int kSlices = kHeadDim / 16;  // of 16 columns
  for (int i = threadIdx.x; i < kBlockN / 4 * kSlices; i += kTransposers) {
    const int t = i % 4;
    const int slice = i / 4 % kSlices;
    const int half = i / 4 / kSlices;  // 16 keys
    uint4 row[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int key = half * 16 + k / 2 * 8 + 2 * t + k % 2;
      row[k] = make_uint4(0, 0, 0, 0);
      if ((!kGeneral || key >= first_key) && key < keys && 16 * slice < p.head_dim_v) {
        row[k] = *reinterpret_cast<const uint4*>(values + key * p.v_stride.row + 16 * slice);
      }
    }
    auto transpose = [&](unsigned a, unsigned b, unsigned c, unsigned d, int first) {
      const unsigned low[2] = {__byte_perm(a, b, 0x5140), __byte_perm(c, d, 0x5140)};
      const unsigned high[2] = {__byte_perm(a, b, 0x7362), __byte_perm(c, d, 0x7362)};
      const int chunk = half / 2 * 2 * kHeadDim + (2 * slice + first / 8) * 16 + half % 2 * 8 + first % 8;
      words[4 * place(chunk) + t] = __byte_perm(low[0], low[1], 0x5410);
      words[4 * place(chunk + 1) + t] = __byte_perm(low[0], low[1], 0x7632);
      words[4 * place(chunk + 2) + t] = __byte_perm(high[0], high[1], 0x5410);
      words[4 * place(chunk + 3) + t] = __byte_perm(high[0], high[1], 0x7632);
    };
    transpose(row[0].x, row[1].x, row[2].x, row[3].x, 0);
    transpose(row[0].y, row[1].y, row[2].y, row[3].y, 4);
    transpose(row[0].z, row[1].z, row[2].z, row[3].z, 8);
    transpose(row[0].w, row[1].w, row[2].w, row[3].w, 12);
  }
  __syncthreads();
  char* const out = value_tiles(params, batch, head_kv) + static_cast<long long>(n) * kKeyBytes;
  for (int i = threadIdx.x; i < kKeyBytes / 16; i += kTransposers) {
    reinterpret_cast<uint4*>(out)[i] = shared_tile[place(i)];
  }
}

}  // namespace fp8
