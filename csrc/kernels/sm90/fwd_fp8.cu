// FP8 attention forward for Hopper (sm_90a): e4m3 Q, K and V with a factor per (batch, KV head) or, in mask kind general,
// per 64 rows of a head; bf16 output, fp32 log-sum-exp.
//
// Built as fwd.cu is: a producer warp, consumer warpgroups of 64 query rows, tiles dealt in rounds. What FP8 changes:
//   - Its products take both operands by columns, so flash_transpose_v first writes V into tiles in shared memory's order,
//     keys permuted such that an accumulator of Q K^T, packed, is an operand of P V: no shuffles.
//   - Its accumulators keep 14 bits, so the values of one key block are summed in a fresh one and added to the output in
//     fp32. It takes the registers of the scores: a warpgroup has no product of its own under its softmax, only others'.
//     With head dim 128 two consumers take turns, one's softmax under the other's products, which last about as long.
//   - The softmax is what takes the time, by its number of instructions. P is 2 to the power of score - base, where a
//     row's base puts its largest P to 2^kHeadroom, well into the range of e4m3, and is raised when a later P may pass
//     448. That is read off the sums of P, so that most blocks need no maximum.
//   - Factors of 64 rows (kGeneral): those of Q and K scale the scores. Those of V become part of P, by their logarithm in
//     the exponent, before the base is chosen: what is rounded to e4m3 is then as large as what it adds to the output. The
//     sums of P take them off again.
#include "common/hopper.cuh"
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"

namespace {

using problem::kCausal;
using problem::kGeneral;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;
constexpr int kBlockN = FA_BLOCK_N;
constexpr int kStages = FA_STAGES;
constexpr int kValueColumns = FA_VALUE_COLUMNS;  // of one product P V
constexpr int kValueBuffers = FA_VALUE_BUFFERS;  // products under way at a time
constexpr bool kTurns = FA_TURNS;  // two consumers take turns at the softmax
// Causal sequences of fewer key blocks take none: on an H200 those of 1,024 keys lose 11 % by them, of 4,096 they gain 6.
constexpr int kManyBlocks = 12;
constexpr bool kEarly = FA_EARLY;  // the next block's scores are begun before the last values are added

constexpr int kConsumers = kBlockM / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kConsumers == 2 || kConsumers == 3, "setmaxnreg");
static_assert(kStages <= 4, "Barriers");
static_assert(!kTurns || kConsumers == 2);
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
// A thread sums its kBlockN / 4 P of a row in four parts: if no part passes kLargest, no P does. The parts of a row
// whose base is new do not.
static_assert(kBlockN / 16 * 32 <= 448);
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

// S = Q K^T of this warpgroup's 64 rows; not waited for.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores], unsigned q_tile, unsigned k_tile) {
  constexpr int kPanelSteps = kRowBytes / 32;
  const unsigned long long q = operand(q_tile);
  const unsigned long long k = operand(k_tile);
#pragma unroll
  for (int step = 0; step < kHeadDim / 32; ++step) {
    const int panel = step / kPanelSteps, column = step % kPanelSteps * 32;
    ScoreProduct::shared(s, hopper::descriptor_after(q, panel * kQueryPanel + column),
                         hopper::descriptor_after(k, panel * kKeyPanel + column), step > 0);
  }
  hopper::wgmma_commit();
}

// P V of the columns of chunk `chunk`; not waited for.
__device__ __forceinline__ void multiply_values(float (&values)[kValueColumns / 2],
                                                const unsigned (&probabilities)[kSteps][4], unsigned v_tile,
                                                int chunk) {
  const unsigned long long v = hopper::descriptor_core_matrices(v_tile);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    OutputProduct::registers(values, probabilities[step],
                             hopper::descriptor_after(v, step * kValueStep + chunk * kValueColumns * 32), step > 0);
  }
  hopper::wgmma_commit();
}

// With kTurns, a consumer's turn is its softmax. Both have the same key blocks, and so as many turns. The compiler moves
// arithmetic past a barrier, all of the softmax if it likes, unless one depends on the other: a wait ends with a zero from
// memory, which is added to the bases of the scores, and a turn with a probability, which is more than -1. Without `turns` a
// consumer waits for its own warps alone, and gives nothing: so there is no branch, which the compiler would make more of.
__device__ __forceinline__ float wait_for_turn(const Barriers& barriers, bool turns, int group) {
  if constexpr (!kTurns) return 0.0f;
  hopper::named_sync(turns ? 1 + group : 3 + group, turns ? 256 : 128);
  return ptx::load_shared_float(barriers.zero());
}

__device__ __forceinline__ void give_turn(int group, float probability) {
  asm volatile(
      "{\n.reg .pred known;\n"
      "setp.gtu.f32 known, %0, 0fBF800000;\n"
      "@known barrier.cta.arrive %1, 256;\n}" ::"f"(probability),
      "r"(2 - group)
      : "memory");
}

// P = 2^x as operands of P V, and its sums by rows, in which P is without V's factors. Returns whether all of this thread's
// P are surely at most kLargest.
template <bool kGiveTurn>
__device__ __forceinline__ bool exponentials(unsigned (&probabilities)[kSteps][4], float (&sum)[2],
                                             const float (&x)[kScores], const Factors& factors, bool turns,
                                             int group) {
  constexpr int kSums = kGeneral ? 2 : 4;  // of a row's P in a part of the key block
  float sums[kParts][2][kSums] = {};
#pragma unroll
  for (int pair = 0; pair < kBlockN / 16; ++pair) {  // of 8-column groups
    const int part = 16 * pair / kPartColumns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = ptx::exp2(x[8 * pair + 4 * (i / 2) + 2 * half + i % 2]);
        sums[part][half][i % kSums] += p[i];
      }
      probabilities[pair / 2][half + 2 * (pair % 2)] = ptx::pack_e4m3(p[0], p[1], p[2], p[3]);
      if (kGiveTurn && pair == kBlockN / 16 - 1 && half == 1) give_turn(group, turns ? p[3] : -2.0f);
    }
  }
  float largest[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (kGeneral) {
      largest[half] = sum[half] = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float(&some)[kSums] = sums[part][half];
        largest[half] = fmaxf(largest[half], fmaxf(some[0], some[1]));
        sum[half] = fmaf(some[0] + some[1], ptx::exp2(-factors.bias[part]), sum[half]);
      }
    } else {
      const float(&all)[kSums] = sums[0][half];
      largest[half] = fmaxf(fmaxf(all[0], all[1]), fmaxf(all[2], all[3]));
      sum[half] = (all[0] + all[1]) + (all[2] + all[3]);
    }
    asm volatile("" : "+f"(sum[half]));  // else the sums wait for the branch that follows, and the parts with them
  }
  return fmaxf(largest[0], largest[1]) <= kLargest;
}

// Raises the rows' bases for a block of scores x, which are relative to them. `factor`: what sums so far must be scaled
// by.
__device__ __forceinline__ void raise_base(float (&x)[kScores], float (&base)[2], float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains, so that a maximum does not wait for the one before it.
    float even = fmaxf(x[2 * half], x[2 * half + 1]);
    float odd = fmaxf(x[4 + 2 * half], x[4 + 2 * half + 1]);
#pragma unroll
    for (int j = 2; j < kBlockN / 8; j += 2) {
      even = fmaxf(even, fmaxf(x[4 * j + 2 * half], x[4 * j + 2 * half + 1]));
      odd = fmaxf(odd, fmaxf(x[4 * j + 4 + 2 * half], x[4 * j + 4 + 2 * half + 1]));
    }
    float m = fmaxf(even, odd);
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const bool unset = base[half] == ptx::kMinusInfinity;
    float up = m - kHeadroom;
    if (!unset) up = fmaxf(up, 0.0f);
    factor[half] = unset ? 0.0f : ptx::exp2(-up);
    base[half] = unset ? up : base[half] + up;
    if (up == ptx::kMinusInfinity) up = 0.0f;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      x[4 * j + 2 * half] -= up;
      x[4 * j + 2 * half + 1] -= up;
    }
  }
}

__device__ __forceinline__ void rescale(float (&out)[kOutputs], float (&row_sum)[2], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i / 2 % 2];
  row_sum[0] *= factor[0];
  row_sum[1] *= factor[1];
}

// Scores to probabilities, and what there is so far to the bases they have. A block that may be masked starts from its
// maximum; another one tries the bases as they are. `zero`: of wait_for_turn.
template <bool kMasked>
__device__ __forceinline__ void softmax(unsigned (&probabilities)[kSteps][4], float (&s)[kScores], float (&base)[2],
                                        float (&row_sum)[2], float (&out)[kOutputs], const Factors& factors,
                                        float zero, bool turns, int group) {
  bool unset = false;  // a row has seen no key
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    unset |= base[half] == ptx::kMinusInfinity;
    const float subtracted = (base[half] == ptx::kMinusInfinity ? 0.0f : base[half]) + zero;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      const int part = 8 * j / kPartColumns;
      const float added = kGeneral ? factors.bias[part] - subtracted : -subtracted;
      s[4 * j + 2 * half] = fmaf(s[4 * j + 2 * half], factors.score[part], added);
      s[4 * j + 2 * half + 1] = fmaf(s[4 * j + 2 * half + 1], factors.score[part], added);
    }
  }
  float sum[2], factor[2];
  if constexpr (kMasked) {
    raise_base(s, base, factor);
    rescale(out, row_sum, factor);
    exponentials<kTurns>(probabilities, sum, s, factors, turns, group);
  } else {
    const bool fits = exponentials<kTurns>(probabilities, sum, s, factors, turns, group) && !unset;
    if (!__all_sync(0xffffffffu, fits)) {
      raise_base(s, base, factor);
      rescale(out, row_sum, factor);
      exponentials<false>(probabilities, sum, s, factors, turns, group);
    }
  }
  row_sum[0] += sum[0];
  row_sum[1] += sum[1];
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

// Softcap: raw scores become c tanh(scale s / c), in base 2.
__device__ __forceinline__ void cap(float (&s)[kScores], float softcap, const float (&scale)[kParts]) {
  const float inverse = 1.0f / softcap;
  const float out = softcap * kLog2e;
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = ptx::tanh(s[i] * (scale[2 * i / kPartColumns] * inverse)) * out;
}

__device__ __forceinline__ void consume(const flash_attn::FwdFp8Params& params, const Barriers& barriers,
                                        unsigned shared_out, unsigned shared_q, unsigned shared_k, unsigned shared_v,
                                        int rounds) {
  const flash_attn::FwdParams& p = params.tma.fwd;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // which the compiler then knows to be uniform
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const unsigned q_tile = shared_q + group * 64 * kRowBytes;
  hopper::Ring<kStages> k_ring, v_ring;
  int q_phase = 0;
  const int my_row = group * 64 + warp * 16 + lane / 4;
  const bool turns = kTurns && (!kCausal || params.blocks_n >= kManyBlocks);
  if (turns && group == 1) give_turn(group, 0.0f);

  for (int round = 0; round < rounds; ++round) {
    const Tile next(params.tma, round);
    if (!next.exists(params.tma)) break;
    const Work work(p, next);
    const int rows = work.sequence.seqlen_q - work.first_row;
    if (rows <= 0) continue;
    float out[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    float base[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
    float row_sum[2] = {0.0f, 0.0f};

    if (!work.empty()) {
      const int head_kv = work.head / p.group;
      const RowFactors q_factors(p.sequences.cu_seqlens_q, work.batch, work.head, p.heads, params.q_descale.blocks, 0,
                                 work.sequence.seqlen_q);
      // Of K, and of V, whose shape is the same.
      const RowFactors key_factors(p.sequences.cu_seqlens_k, work.batch, head_kv, p.heads_kv,
                                   max(params.k_descale.blocks, params.v_descale.blocks), padding_of(p, work.batch),
                                   work.sequence.seqlen_k + work.skew);
      const bool q_blocks = kGeneral && params.q_descale.blocks > 0;
      const bool k_blocks = kGeneral && params.k_descale.blocks > 0;
      const bool v_blocks = kGeneral && params.v_descale.blocks > 0;
      const float q_factor = q_blocks ? q_factors.at(params.q_descale, (work.first_row + group * 64) / flash_attn::kDescaleRows)
                                      : factor_of(params.q_descale, work.batch, head_kv);
      const float descale = k_blocks ? q_factor : q_factor * factor_of(params.k_descale, work.batch, head_kv);
      const bool capped = kGeneral && p.modifiers.softcap > 0.0f;
      const float score_scale = positive_scale((capped ? p.scale : p.scale_log2) * descale);
      auto factors_of = [&](int n) {
        Factors factors;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          factors.score[part] = score_scale;
          factors.bias[part] = 0.0f;
          if (k_blocks) {
            factors.score[part] = positive_scale(score_scale * key_factors.at(params.k_descale, n * kParts + part));
          }
          if (v_blocks) {
            factors.bias[part] = ptx::log2(fmaxf(key_factors.at(params.v_descale, n * kParts + part), kSmallestFactor));
          }
        }
        return factors;
      };
      const int row = work.first_row + my_row;
      const int key = lane % 4 * 2;
      hopper::barrier_wait(barriers.q_full(), q_phase);
      q_phase ^= 1;

      float s[kScores];
      auto begin_scores = [&]() {
        hopper::barrier_wait(barriers.k_full(k_ring.stage), k_ring.phase);
        hopper::wgmma_fence();
        multiply_scores(s, q_tile, shared_k + k_ring.stage * kKeyBytes);
      };
      auto finish_scores = [&]() {
        hopper::wgmma_wait<0>();
        hopper::hold(s);
        if (lane == 0) hopper::barrier_arrive(barriers.k_empty(k_ring.stage));
        k_ring.advance();
      };
      // Key block n. With kEarly its scores are there, and at the end those of the next, unless it is the last.
      auto step = [&](int n, auto masked, auto is_last) {
        constexpr bool kMasked = decltype(masked)::value;
        constexpr bool kNext = kEarly && !decltype(is_last)::value;
        Factors factors = factors_of(n);
        if constexpr (!kEarly) {
          begin_scores();
          finish_scores();
        }
        unsigned probabilities[kSteps][4];
        const float zero = wait_for_turn(barriers, turns, group);
        if constexpr (kGeneral) {
          if (capped) {
            cap(s, p.modifiers.softcap, factors.score);
#pragma unroll
            for (int part = 0; part < kParts; ++part) factors.score[part] = 1.0f;
          }
          if (n >= work.full_last || n < work.full_first) apply_mask(s, work.mask, row, n * kBlockN + key - work.skew);
        } else if constexpr (kMasked) {
          apply_mask(s, work.mask, row, n * kBlockN + key);
        }
        softmax<kMasked>(probabilities, s, base, row_sum, out, factors, zero, turns, group);
        float values[kValueBuffers][kValueColumns / 2];
        const unsigned v_tile = shared_v + v_ring.stage * kKeyBytes;
        hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
        hopper::wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < kValueBuffers; ++chunk) {
          multiply_values(values[chunk], probabilities, v_tile, chunk);
        }
#pragma unroll
        for (int chunk = 0; chunk < kValueChunks; ++chunk) {
          if (kNext && chunk + 1 == kValueChunks) {
            begin_scores();
            hopper::wgmma_wait<1>();
          } else if (kValueBuffers == 2 && chunk + 1 < kValueChunks) {
            hopper::wgmma_wait<1>();
          } else {
            hopper::wgmma_wait<0>();
          }
          float(&sums)[kValueColumns / 2] = values[chunk % kValueBuffers];
          hopper::hold(sums);
#pragma unroll
          for (int i = 0; i < kValueColumns / 2; ++i) out[chunk * kValueColumns / 2 + i] += sums[i];
          if (chunk + kValueBuffers < kValueChunks) {
            hopper::wgmma_fence();
            multiply_values(sums, probabilities, v_tile, chunk + kValueBuffers);
          }
        }
        if (lane == 0) hopper::barrier_arrive(barriers.v_empty(v_ring.stage));
        v_ring.advance();
        if constexpr (kNext) finish_scores();
      };
      if constexpr (kEarly) {
        begin_scores();
        finish_scores();
      }
      int n = work.last - 1;
      const int end = kEarly ? work.first + 1 : work.first;  // with kEarly, the last block is another step
      if constexpr (kGeneral) {
        for (; n >= end; --n) step(n, tile::True{}, tile::False{});
      } else {
        if (n >= end) step(n--, tile::True{}, tile::False{});
        if constexpr (kCausal) {
          for (; n >= max(end, work.full_last); --n) step(n, tile::True{}, tile::False{});
        }
        for (; n >= end; --n) step(n, tile::False{}, tile::False{});
      }
      if constexpr (kEarly) {
        if (kGeneral || n == work.last - 1 || n >= work.full_last) {
          step(n, tile::True{}, tile::True{});
        } else {
          step(n, tile::False{}, tile::True{});
        }
      }
      if (lane == 0) hopper::barrier_arrive(barriers.q_empty());
    }

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
}

}  // namespace

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
