// Attention forward for Hopper (sm_90a): O = softmax(scale Q K^T) V and the log-sum-exp of each row.
//
// Warp specialised (FlashAttention-3, Shah et al. 2024): a producer warp deals out the tiles and fetches Q, K and V by bulk
// tensor copies; each consumer warpgroup owns 64 query rows of a tile, multiplies by wgmma, and has its softmax run under
// matrix products: its own P V of the block before, and those of the other consumers. (Having consumers take turns, as
// there, was slower on every tile tried.)
//
// Persistent, and nothing ends with a tile. The consumers of a thread block share K and V, but each has its own Q, and its
// own key blocks: those that all its rows are masked from it lets pass. So they drift apart by as much as the ring of K and
// V holds, and one stores its result while the others multiply; the first Q K^T of its next tile runs meanwhile.
//
// P is 2 to the power of score - base, where a row's base is the largest score of its first block. Later blocks need no
// maximum: their exponentials begin at once, and that all P are in range is read off the row sums. A block of which that is
// not so is put right, and the base raised. Blocks at the right edge of a mask find their maximum; the base is then raised,
// and the accumulator rescaled, only when a score outgrows it. So do blocks at the left edge of a window, unless there are
// others between the edges, by which every row has its base.
//
// The general mask kind has windows, chunks, softcap and sink here; ALiBi and dropout are the sm80 family's.
#include "common/hopper.cuh"
#include "common/problem.cuh"
#include "common/ptx.cuh"
#include "common/tile.cuh"
#include "params.h"
#include "sm90/bases.cuh"
#include "sm90/edges.cuh"

namespace {

using problem::kCausal;
using problem::kGeneral;

constexpr int kHeadDim = FA_HEAD_DIM;
constexpr int kBlockM = FA_BLOCK_M;
constexpr int kBlockN = FA_BLOCK_N;
constexpr int kStages = FA_STAGES;  // of K, and of V
constexpr int kQueryStages = FA_Q_STAGES;
constexpr bool kBf16 = FA_BF16;

constexpr int kConsumers = kBlockM / 64;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
static_assert(kConsumers >= 2 && kConsumers <= 4, "setmaxnreg");
constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
static_assert(kThreads == FA_WARPS * 32 && kConsumers * 64 == kBlockM && kBlockN % 16 == 0);

constexpr int kScores = kBlockN / 2;    // of a thread: 2 rows, kBlockN / 4 columns
constexpr int kOutputs = kHeadDim / 2;
constexpr float kSlack = 8.0f;  // how much a score may be above its row's base, where a maximum is taken
constexpr float kLog2e = 1.4426950408889634074f;
constexpr float kLn2 = 0.69314718055994530942f;

constexpr int kPanels = (kHeadDim + 63) / 64;
constexpr int kQueryPanel = 64 * tile::kRowBytes;  // of one consumer
constexpr int kKeyPanel = kBlockN * tile::kRowBytes;
constexpr int kQueryBytes = kPanels * kQueryPanel;
constexpr int kKeyBytes = kPanels * kKeyPanel;
constexpr int kControlBytes = 1024;
static_assert(kQueryStages * kConsumers * kQueryBytes + 2 * kStages * kKeyBytes + kControlBytes == FA_SMEM_BYTES,
              "kernels.toml: smem of fwd");

using ScoreProduct = hopper::Wgmma<kBf16, kBlockN>;
using OutputProduct = hopper::Wgmma<kBf16, kHeadDim>;

extern __shared__ __align__(1024) char shared_memory[];

// One tile of work: up to kBlockM queries of a head.
struct Work {
  int batch;               // negative: there is no more
  int head;
  int first_row, end_row;  // its queries in the sequence
  int q_row, k_row;        // where the sequence begins
  int seqlen_q, seqlen_k;
  int first, last;         // key blocks [first, last) hold keys that a query sees
  int reversed;            // every other tile: the last rows, which see the most keys, are for the first consumer

  __device__ __forceinline__ int row_of(int group) const {
    return first_row + 64 * (reversed ? kConsumers - 1 - group : group);
  }
};
constexpr int kWorkBytes = 48;
constexpr int kWorks = 2;  // the tile at hand and the next: what is claimed earlier may be missed elsewhere at the end

// Shared memory: Q of each stage and consumer, K, V, barriers of 8 bytes, works.
struct Shared {
  unsigned base;
  static constexpr int kKeys = kQueryStages * kConsumers * kQueryBytes;
  static constexpr int kValues = kKeys + kStages * kKeyBytes;
  static constexpr int kQueryBarriers = kValues + kStages * kKeyBytes;
  static constexpr int kKeyBarriers = kQueryBarriers + 16 * kQueryStages * kConsumers;
  static constexpr int kValueBarriers = kKeyBarriers + 16 * kStages;
  static constexpr int kWorkBarriers = kValueBarriers + 16 * kStages;
  static constexpr int kWork = (kWorkBarriers + 16 * kWorks + 15) / 16 * 16;
  static_assert(kWork + kWorks * kWorkBytes <= FA_SMEM_BYTES);

  __device__ __forceinline__ unsigned q(int s, int group) const { return base + (s * kConsumers + group) * kQueryBytes; }
  __device__ __forceinline__ unsigned k(int s) const { return base + kKeys + s * kKeyBytes; }
  __device__ __forceinline__ unsigned v(int s) const { return base + kValues + s * kKeyBytes; }
  __device__ __forceinline__ unsigned work(int s) const { return base + kWork + s * kWorkBytes; }

  __device__ __forceinline__ unsigned q_full(int s, int group) const {
    return base + kQueryBarriers + 16 * (s * kConsumers + group);
  }
  __device__ __forceinline__ unsigned q_empty(int s, int group) const { return q_full(s, group) + 8; }
  __device__ __forceinline__ unsigned k_full(int s) const { return base + kKeyBarriers + 16 * s; }
  __device__ __forceinline__ unsigned k_empty(int s) const { return k_full(s) + 8; }
  __device__ __forceinline__ unsigned v_full(int s) const { return base + kValueBarriers + 16 * s; }
  __device__ __forceinline__ unsigned v_empty(int s) const { return v_full(s) + 8; }
  __device__ __forceinline__ unsigned work_full(int s) const { return base + kWorkBarriers + 16 * s; }
  __device__ __forceinline__ unsigned work_empty(int s) const { return work_full(s) + 8; }
};

__device__ __forceinline__ Work read_work(const Shared& shared, int slot) {
  const uint4 a = ptx::load_shared_16(shared.work(slot));
  const uint4 b = ptx::load_shared_16(shared.work(slot) + 16);
  const uint4 c = ptx::load_shared_16(shared.work(slot) + 32);
  return {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z), static_cast<int>(a.w),
          static_cast<int>(b.x), static_cast<int>(b.y), static_cast<int>(b.z), static_cast<int>(b.w),
          static_cast<int>(c.x), static_cast<int>(c.y), static_cast<int>(c.z)};
}

// The order of the tiles. The (batch, head) pairs come in groups whose K and V stay in L2; in a group the longest tiles of
// all pairs come first. Sequences of different lengths come one after another, each so in itself.
struct Schedule {
  const flash_attn::FwdTmaParams& p;
  bool varies;          // sequences have different numbers of queries
  int sequence = 0;     // the first of the 32 that are looked at
  unsigned before = 0;  // tiles of those before it

  __device__ __forceinline__ explicit Schedule(const flash_attn::FwdTmaParams& params)
      : p(params),
        varies(params.fwd.sequences.cu_seqlens_q != nullptr || params.fwd.sequences.seqused_q != nullptr) {}

  // Tile `index` of `pairs` pairs with `blocks` tiles each.
  __device__ __forceinline__ void split(int index, int pairs, int blocks, int& pair, int& block) const {
    const int per_group = p.heads_per_group * blocks;
    const int group = index / per_group;
    const int members = min(p.heads_per_group, pairs - group * p.heads_per_group);
    const int rank = (index - group * per_group) / members;
    pair = group * p.heads_per_group + (index - group * per_group) - rank * members;
    block = blocks - 1 - rank;
  }

  // Tile `number`, for a whole warp; numbers only grow.
  __device__ __forceinline__ bool find(unsigned number, int lane, int& batch, int& head, int& block) {
    const flash_attn::FwdParams& f = p.fwd;
    if (!varies) {
      if (number >= static_cast<unsigned>(f.batch * f.heads * f.blocks_m)) return false;
      int pair;
      split(static_cast<int>(number), f.batch * f.heads, f.blocks_m, pair, block);
      batch = pair / f.heads;
      head = pair - batch * f.heads;
      return true;
    }
    for (; sequence < f.batch; sequence += 32) {
      int blocks = 0;
      if (sequence + lane < f.batch) {
        blocks = (max(0, problem::Sequence(f, sequence + lane).seqlen_q) + kBlockM - 1) / kBlockM;
      }
      int sum = blocks;  // of this lane's sequence and those before it
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      const unsigned reached = __ballot_sync(0xffffffffu, before + sum * f.heads > number);
      if (reached != 0) {
        const int found = __ffs(reached) - 1;
        blocks = __shfl_sync(0xffffffffu, blocks, found);
        const int skipped = __shfl_sync(0xffffffffu, sum, found) - blocks;
        split(number - before - skipped * f.heads, f.heads, blocks, head, block);
        batch = sequence + found;
        return true;
      }
      before += __shfl_sync(0xffffffffu, sum, 31) * f.heads;
    }
    return false;
  }

  __device__ __forceinline__ Work next(unsigned number, int reversed, int lane) {
    Work work = {};
    work.reversed = reversed;
    int block;
    if (!find(number, lane, work.batch, work.head, block)) {
      work.batch = -1;
      return work;
    }
    const problem::Sequence sequence(p.fwd, work.batch);
    const problem::Mask mask(sequence.seqlen_q, sequence.seqlen_k, p.fwd.modifiers);
    // Where the tiles do not divide a sequence, the first one is short: under a causal mask it has the fewest keys.
    const int end = (sequence.seqlen_q + 63) / 64 * 64;
    const int blocks = (sequence.seqlen_q + kBlockM - 1) / kBlockM;
    work.end_row = end - (blocks - 1 - block) * kBlockM;
    work.first_row = max(0, work.end_row - kBlockM);
    work.end_row = min(work.end_row, sequence.seqlen_q);
    work.q_row = static_cast<int>(sequence.q_row);
    work.k_row = static_cast<int>(sequence.k_row);
    work.seqlen_q = sequence.seqlen_q;
    work.seqlen_k = sequence.seqlen_k;
    work.last = max(0, mask.last(work.end_row - 1) + kBlockN) / kBlockN;
    work.first = kGeneral ? mask.first(work.first_row) / kBlockN : 0;
    return work;
  }
};

// The scheduler warp: finds the tiles of this thread block and describes them to the others. In rounds, every other one in
// reverse, so that each thread block gets its share of long and short tiles; or, with a counter, as they come.
__device__ __forceinline__ void schedule(const flash_attn::FwdTmaParams& p, const Shared& shared, int lane) {
  Schedule order(p);
  // Under a window the last rows see no more keys than the first: each consumer then passes as many before its own in a
  // tile as after them in the one before.
  const int reverses = !kGeneral || p.fwd.modifiers.window_left >= p.fwd.seqlen_k;
  hopper::Ring<kWorks> ring;
  for (int round = 0;; ++round) {
    hopper::barrier_wait(shared.work_empty(ring.stage), ring.phase ^ 1);
    unsigned number = round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (p.next_tile != nullptr) number = __shfl_sync(0xffffffffu, lane == 0 ? atomicAdd(p.next_tile, 1) : 0, 0);
    const Work work = order.next(number, round & 1 & reverses, lane);
    if (lane == 0) {
      const unsigned place = shared.work(ring.stage);
      ptx::store_shared_16(place, make_uint4(work.batch, work.head, work.first_row, work.end_row));
      ptx::store_shared_16(place + 16, make_uint4(work.q_row, work.k_row, work.seqlen_q, work.seqlen_k));
      ptx::store_shared_16(place + 32, make_uint4(work.first, work.last, work.reversed, 0));
      hopper::barrier_arrive(shared.work_full(ring.stage));
    }
    if (work.batch < 0) break;
    ring.advance();
  }
}

// The loading thread: fetches Q, K and V of the tiles, as far ahead of their use as there is room.
__device__ __forceinline__ void load(const flash_attn::FwdTmaParams& p, const Shared& shared) {
  hopper::Ring<kStages> k_ring, v_ring;
  unsigned tiles = 0;  // those with keys; counters take fewer of the loading warp's 32 registers than rings
  for (unsigned number = 0;; ++number) {
    hopper::barrier_wait(shared.work_full(number % kWorks), number / kWorks % 2);
    const Work work = read_work(shared, number % kWorks);
    hopper::barrier_arrive(shared.work_empty(number % kWorks));
    if (work.batch < 0) break;
    if (work.last <= work.first) continue;
    const int key_head = work.head / p.fwd.group;
    const int key_batch = p.fwd.sequences.cu_seqlens_k != nullptr ? 0 : work.batch;
    auto load_tile = [&](const void* map, unsigned full, unsigned dst, int n) {
      hopper::barrier_expect_bytes(full, kKeyBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        hopper::load_box(dst + panel * kKeyPanel, map, full, panel * 64, work.k_row + n * kBlockN, key_head, key_batch);
      }
    };
    auto load_k = [&](int n) {
      hopper::barrier_wait(shared.k_empty(k_ring.stage), k_ring.phase ^ 1);
      load_tile(p.k_map, shared.k_full(k_ring.stage), shared.k(k_ring.stage), n);
      k_ring.advance();
    };
    auto load_v = [&](int n) {
      hopper::barrier_wait(shared.v_empty(v_ring.stage), v_ring.phase ^ 1);
      load_tile(p.v_map, shared.v_full(v_ring.stage), shared.v(v_ring.stage), n);
      v_ring.advance();
    };
    load_k(work.last - 1);
#pragma unroll 1
    for (int group = 0; group < kConsumers; ++group) {
      const unsigned full = shared.q_full(tiles % kQueryStages, group);
      hopper::barrier_wait(shared.q_empty(tiles % kQueryStages, group), tiles / kQueryStages % 2 ^ 1);
      hopper::barrier_expect_bytes(full, kQueryBytes);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        hopper::load_box(shared.q(tiles % kQueryStages, group) + panel * kQueryPanel, p.q_map, full, panel * 64,
                         work.q_row + work.row_of(group), work.head,
                         p.fwd.sequences.cu_seqlens_q != nullptr ? 0 : work.batch);
      }
    }
    ++tiles;
#pragma unroll 1
    for (int n = work.last - 1; n > work.first; --n) {
      load_k(n - 1);
      load_v(n);
    }
    load_v(work.first);
  }
}

// S = Q K^T of this warpgroup's 64 rows; not waited for.
__device__ __forceinline__ void multiply_scores(float (&s)[kScores], unsigned q_tile, unsigned k_tile) {
  const unsigned long long q = hopper::descriptor_k_major(q_tile);
  const unsigned long long k = hopper::descriptor_k_major(k_tile);
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int panel = step / 4, column = step % 4 * 32;
    ScoreProduct::shared(s, hopper::descriptor_after(q, panel * kQueryPanel + column),
                         hopper::descriptor_after(k, panel * kKeyPanel + column), step > 0);
  }
  hopper::wgmma_commit();
}

// O += P V; not waited for.
__device__ __forceinline__ void multiply_values(float (&out)[kOutputs], const unsigned (&probabilities)[kBlockN / 16][4],
                                                unsigned v_tile) {
  const unsigned long long v = hopper::descriptor_mn_major(v_tile, kKeyPanel);
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
    OutputProduct::registers(out, probabilities[step], hopper::descriptor_after(v, step * 16 * tile::kRowBytes));
  }
  hopper::wgmma_commit();
}

// Zeroes the rows of a V tile that lie after the sequence's last key. The copy engine zeroes only what is outside of the
// tensor; what else is there, perhaps NaN, would survive a probability of 0.
__device__ __forceinline__ void clear_tail(unsigned v_tile, int valid, int group, int thread) {
  const int chunks = (kBlockN - valid) * 8;
  for (int i = thread; i < chunks * kPanels; i += 128) {
    const int panel = i / chunks;
    ptx::store_shared_16(v_tile + panel * kKeyPanel + valid * tile::kRowBytes + (i - panel * chunks) * 16,
                         make_uint4(0, 0, 0, 0));
  }
  hopper::fence_proxy_async();
  hopper::named_sync(1 + group, 128);
}

// Scores to probabilities, in place. Returns by `factor` what the accumulator must be scaled by, and whether any row of
// the warp needs it.
template <bool kMasked>
__device__ __forceinline__ bool softmax(float (&s)[kScores], float (&row_max)[2], float (&row_sum)[2],
                                        float (&factor)[2], float scale_log2) {
  float block_max[2];
  bool grows = false;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // Two chains, so that a maximum does not wait for the one before it.
    float even = fmaxf(s[2 * half], s[2 * half + 1]);
    float odd = fmaxf(s[4 + 2 * half], s[4 + 2 * half + 1]);
#pragma unroll
    for (int j = 2; j < kBlockN / 8; j += 2) {
      even = fmaxf(even, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
      odd = fmaxf(odd, fmaxf(s[4 * j + 4 + 2 * half], s[4 * j + 4 + 2 * half + 1]));
    }
    block_max[half] = fmaxf(even, odd) * scale_log2;
    grows |= block_max[half] > row_max[half] + kSlack;
  }
  const bool any = __any_sync(0xffffffffu, grows);
  if (any) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float m = fmaxf(block_max[half], row_max[half]);
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      factor[half] = ptx::exp2(row_max[half] - (kMasked && m == ptx::kMinusInfinity ? 0.0f : m));
      row_max[half] = m;
      row_sum[half] *= factor[half];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float base = kMasked && row_max[half] == ptx::kMinusInfinity ? 0.0f : row_max[half];
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int j = 0; j < kBlockN / 8; ++j) {
      float& low = s[4 * j + 2 * half];
      float& high = s[4 * j + 2 * half + 1];
      low = ptx::exp2(fmaf(low, scale_log2, -base));
      high = ptx::exp2(fmaf(high, scale_log2, -base));
      even += low;
      odd += high;
    }
    row_sum[half] += even + odd;
  }
  return any;
}

// Softcap c: raw scores become tanh(scale s / c); what is left, times c, is done by the softmax, whose scale it is.
__device__ __forceinline__ void cap(float (&s)[kScores], const flash_attn::FwdParams& p) {
  if (p.modifiers.softcap <= 0.0f) return;
  const float in = p.scale * ptx::reciprocal(p.modifiers.softcap);
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = ptx::tanh(s[i] * in);
}

__device__ __forceinline__ void as_operand(unsigned (&probabilities)[kBlockN / 16][4], const float (&s)[kScores]) {
#pragma unroll
  for (int step = 0; step < kBlockN / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      probabilities[step][i] = ptx::pack<kBf16>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
    }
  }
}

__device__ __forceinline__ void rescale(float (&out)[kOutputs], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i / 2 % 2];
}

// Writes 64 rows of 16-bit values, a warp 16 of them from `first_row` on. `value(half, j)`: a thread's pair of row
// lane / 4 + 8 half and columns 8 j + 2 (lane % 4). Four lanes exchange theirs, so that each has 16 bytes of a row. No store
// is a branch, at which the exchanges of the next would wait.
template <typename Value>
__device__ __forceinline__ void store_rows(const flash_attn::FwdParams& p, const Work& work, int first_row, int lane,
                                           Value value) {
  constexpr int kFours = kHeadDim / 32;
  const bool odd = lane & 1;
  const bool upper = lane & 2;
  const int row = first_row + lane / 4;
  char* const destination = tile::destination(p.out, p.out_stride, work.batch, work.head, work.q_row + row, lane % 4);
  const int columns = p.head_dim_v - lane % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint2 keep[kFours], give[kFours];
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const unsigned a = value(half, 4 * i), b = value(half, 4 * i + 1);
      const unsigned c = value(half, 4 * i + 2), d = value(half, 4 * i + 3);
      const unsigned ab = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1);
      const unsigned cd = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
      // Lanes 0 and 1 have the first half of 8 j and 8 (j + 1), and of 8 (j + 2) and 8 (j + 3); lanes 2 and 3 the second.
      const uint2 low = make_uint2(odd ? ab : a, odd ? b : ab);
      const uint2 high = make_uint2(odd ? cd : c, odd ? d : cd);
      give[i] = make_uint2(upper ? low.x : high.x, upper ? low.y : high.y);
      keep[i] = make_uint2(upper ? high.x : low.x, upper ? high.y : low.y);
    }
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      give[i].x = __shfl_xor_sync(0xffffffffu, give[i].x, 2);
      give[i].y = __shfl_xor_sync(0xffffffffu, give[i].y, 2);
    }
    const int limit = row + 8 * half < work.end_row ? columns : 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      ptx::store_global_16(destination + half * 16 * p.out_stride.row + 64 * i,
                           make_uint4(upper ? give[i].x : keep[i].x, upper ? give[i].y : keep[i].y,
                                      upper ? keep[i].x : give[i].x, upper ? keep[i].y : give[i].y),
                           32 * i < limit);
    }
  }
}

// A warpgroup's part of a tile.
struct Part {
  bool exists;                // there is a tile
  int row;                    // the first of this warp's 16 queries
  int first, last;            // key blocks [first, last) hold keys that one of the warpgroup's queries sees
  int full_first, full_last;  // of these, [full_first, full_last) need no mask, and those before it no maximum
  bool cut;                   // the sequence ends within the last of them
  int before;                 // key blocks of the tile that are passed before `last`

  __device__ __forceinline__ bool empty() const { return last <= first; }
};

// A consumer warpgroup's way through the rings.
struct Consumer {
  const flash_attn::FwdTmaParams& params;
  const Shared& shared;
  int group, thread, lane;
  hopper::Ring<kStages> k_ring, v_ring;
  hopper::Ring<kQueryStages> q_ring;
  unsigned tiles = 0;  // that were opened

  __device__ __forceinline__ void arrive(unsigned barrier) const {
    if (lane == 0) hopper::barrier_arrive(barrier);
  }
  __device__ __forceinline__ void wait_q() const {
    hopper::barrier_wait(shared.q_full(q_ring.stage, group), q_ring.phase);
  }
  __device__ __forceinline__ void release_q() const { arrive(shared.q_empty(q_ring.stage, group)); }
  __device__ __forceinline__ void wait_k() const { hopper::barrier_wait(shared.k_full(k_ring.stage), k_ring.phase); }
  __device__ __forceinline__ void release_k() {
    arrive(shared.k_empty(k_ring.stage));
    k_ring.advance();
  }
  __device__ __forceinline__ void wait_v() const { hopper::barrier_wait(shared.v_full(v_ring.stage), v_ring.phase); }
  __device__ __forceinline__ void release_v() {
    arrive(shared.v_empty(v_ring.stage));
    v_ring.advance();
  }
  // What is let pass is read by no product, which would have the warp's lanes wait for each other.
  __device__ __forceinline__ void pass_k(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_k();
      __syncwarp();
      release_k();
    }
  }
  __device__ __forceinline__ void pass_v(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      wait_v();
      __syncwarp();
      release_v();
    }
  }
  __device__ __forceinline__ void pass(int count) {
#pragma unroll 1
    for (; count > 0; --count) {
      pass_k(1);
      pass_v(1);
    }
  }

  __device__ __forceinline__ int row_of_warp(const Work& work) const { return work.row_of(group) + thread / 32 * 16; }

  // The next tile, once it is known.
  __device__ __forceinline__ Part open() {
    hopper::barrier_wait(shared.work_full(tiles % kWorks), tiles / kWorks % 2);
    ++tiles;
    const Work work = this->work();
    const problem::Mask mask(work.seqlen_q, work.seqlen_k, params.fwd.modifiers);
    const int begin = work.row_of(group);
    const int end = min(begin + 64, work.end_row) - 1;
    Part part;
    part.exists = work.batch >= 0;
    part.row = row_of_warp(work);
    part.first = work.first;
    part.last = max(0, mask.last(end) + kBlockN) / kBlockN;
    part.full_first = 0;
    // Where there is a mask, the block in which the first row's last key is the last one counts as masked: by then every row
    // has a base.
    part.full_last = max(0, mask.last(begin) + (kCausal || kGeneral ? 0 : 1)) / kBlockN;
    if constexpr (kGeneral) {
      part.first = max(part.first, mask.first(begin) / kBlockN);
      part.full_first = (mask.first(end) + kBlockN - 1) / kBlockN;
      if (part.full_last <= part.full_first) part.full_last = part.first;  // nothing is between the edges
    }
    if (end < begin || part.empty()) part.first = part.last = work.last;
    part.exists = ptx::uniform(part.exists);
    part.row = ptx::uniform(part.row);
    part.first = ptx::uniform(part.first);
    part.last = ptx::uniform(part.last);
    part.full_first = ptx::uniform(part.full_first);
    part.full_last = ptx::uniform(part.full_last);
    part.cut = ptx::uniform(work.seqlen_k) < part.last * kBlockN;
    part.before = ptx::uniform(work.last) - part.last;
    return part;
  }

  // Where the tile that was opened last is described, and how.
  __device__ __forceinline__ unsigned slot() const { return (tiles - 1) % kWorks; }
  __device__ __forceinline__ Work work() const { return read_work(shared, slot()); }

  // Every lane says that it has read what it needs of the description.
  __device__ __forceinline__ void close() const { hopper::barrier_arrive(shared.work_empty(slot())); }

  __device__ __forceinline__ float* lse(const Work& work) const {
    const flash_attn::FwdParams& p = params.fwd;
    return p.lse + work.batch * p.lse_batch_stride + work.head * p.lse_head_stride + work.q_row;
  }

  // A tile in which this warpgroup's queries, if it has any, see no key.
  __device__ __forceinline__ void finish_empty(const Part& part) {
    const Work work = this->work();
    if (work.last > work.first) {
      wait_q();
      __syncwarp();
      release_q();
      q_ring.advance();
      pass(work.last - work.first);
    }
    const flash_attn::FwdParams& p = params.fwd;
    const bool sink = kGeneral && p.modifiers.sink != nullptr;
    if (lane < 16 && part.row + lane < work.end_row) {
      lse(work)[part.row + lane] = sink ? p.modifiers.sink[work.head] : ptx::kMinusInfinity;
    }
    store_rows(p, work, part.row, lane, [](int, int) { return 0u; });
    close();
  }

  // The result and its log-sum-exp. Without a branch: what does not depend on the last product runs under it.
  __device__ __forceinline__ void finish(const Work& work, const float (&out)[kOutputs], const float (&row_max)[2],
                                         const float (&row_sum)[2]) const {
    const flash_attn::FwdParams& p = params.fwd;
    const int first_row = row_of_warp(work);
    float sink = ptx::kMinusInfinity;  // one more logit of each row, with no value behind it
    if (kGeneral && p.modifiers.sink != nullptr) sink = p.modifiers.sink[work.head] * kLog2e;
    float inverse[2], sums[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half] = row_sum[half] + __shfl_xor_sync(0xffffffffu, row_sum[half], 1);
      sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 2);
    }
    float* const row_lse = lse(work) + first_row + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[half];
      float scale = 1.0f;
      float m = row_max[half];
      if constexpr (kGeneral) {
        m = fmaxf(m, sink);
        if (m != ptx::kMinusInfinity) {
          scale = ptx::exp2(row_max[half] - m);
          sum = fmaf(sum, scale, ptx::exp2(sink - m));
        }
      }
      inverse[half] = sum == 0.0f ? 0.0f : scale * ptx::reciprocal(sum);
      // Of no key, both m and the logarithm are -infinity.
      ptx::store_global(row_lse + 8 * half, (m + ptx::log2(sum)) * kLn2,
                        lane % 4 == 0 && first_row + lane / 4 + 8 * half < work.end_row);
    }
    store_rows(p, work, first_row, lane, [&](int half, int j) {
      return ptx::pack<kBf16>(out[4 * j + 2 * half] * inverse[half], out[4 * j + 2 * half + 1] * inverse[half]);
    });
  }
};

__device__ __forceinline__ void consume(const flash_attn::FwdTmaParams& params, const Shared& shared) {
  const flash_attn::FwdParams& p = params.fwd;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int group = ptx::uniform(threadIdx.x / 128 - 1);
  Consumer c{params, shared, group, thread, lane};
  const float scale_log2 = kGeneral && p.modifiers.softcap > 0.0f ? p.modifiers.softcap * kLog2e : p.scale_log2;

  float s[kScores];
  float out[kOutputs];
  unsigned probabilities[kBlockN / 16][4];
  Part part = c.open();
  bool begun = false;  // the first scores of the tile are under way
  while (part.exists) {
    if (!begun) {
      if (part.empty()) {
        c.finish_empty(part);
        part = c.open();
        continue;
      }
      c.wait_q();
      c.pass(part.before);
      part.before = 0;
      c.wait_k();
      hopper::wgmma_fence();
      multiply_scores(s, shared.q(c.q_ring.stage, group), shared.k(c.k_ring.stage));
    }
    float row_max[2] = {ptx::kMinusInfinity, ptx::kMinusInfinity};
    float row_sum[2] = {0.0f, 0.0f};
    int n = part.last - 1;
    auto mask = [&]() {
      const uint4 sequence = ptx::load_shared_16(shared.work(c.slot()) + 16);
      edges::hide(s, problem::Mask(sequence.z, sequence.w, p.modifiers), part.row + lane / 4, n * kBlockN + lane % 4 * 2);
    };

    hopper::wgmma_wait<0>();
    hopper::hold(s);
    c.release_k();
    if (n == part.first) c.release_q();
    if constexpr (kGeneral) cap(s, p);
    if (kCausal || kGeneral || n >= part.full_last) mask();
    float factor[2];
    softmax<true>(s, row_max, row_sum, factor, scale_log2);
    as_operand(probabilities, s);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    c.pass_v(part.before);
    if (part.cut) {
      c.wait_v();
      clear_tail(shared.v(c.v_ring.stage), c.work().seqlen_k - n * kBlockN, group, thread);
    }
    --n;

    auto step = [&](auto masked) {
      constexpr bool kMasked = decltype(masked)::value;
      float factor[2];
      c.wait_k();
      hopper::wgmma_fence();
      multiply_scores(s, shared.q(c.q_ring.stage, group), shared.k(c.k_ring.stage));
      c.wait_v();
      multiply_values(out, probabilities, shared.v(c.v_ring.stage));
      hopper::wgmma_wait<1>();
      hopper::hold(s);
      c.release_k();
      if (n == part.first) c.release_q();
      if constexpr (kGeneral) cap(s, p);
      if constexpr (kMasked) {
        mask();
      } else {
        if (kGeneral && n < part.full_first) mask();
        float sum[2];
        bases::exponentials(s, sum, row_max, scale_log2);
        // The compiler would have the exponentials wait for P V: it moves a wait up as far as a branch.
        hopper::hold(s);
        hopper::hold(sum);
        c.wait_v();
        hopper::wgmma_wait<0>();
        hopper::hold(out);
        c.release_v();
        const float largest = fmaxf(sum[0], sum[1]);
        if (__any_sync(0xffffffffu, largest > bases::kLargest)) {
          bool grown = true;
          if (__any_sync(0xffffffffu, largest == ptx::kInfinity)) {
            const Work work = c.work();
            bases::multiply_again<kBf16>(s, p, work.batch, work.head, work.q_row, part.row, work.k_row, n * kBlockN, lane);
            if constexpr (kGeneral) {
              cap(s, p);
              if (n < part.full_first) mask();
            }
            sum[0] = sum[1] = 0.0f;
            grown = softmax<true>(s, row_max, row_sum, factor, scale_log2);
          } else {
            bases::raise(s, sum, row_max, factor);
            row_sum[0] *= factor[0];
            row_sum[1] *= factor[1];
          }
          if (grown) rescale(out, factor);
        }
        as_operand(probabilities, s);
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
        return;
      }
      const bool grown = softmax<kMasked>(s, row_max, row_sum, factor, scale_log2);
      hopper::wgmma_wait<0>();
      hopper::hold(out);
      c.release_v();
      as_operand(probabilities, s);
      if (grown) rescale(out, factor);
    };
    if constexpr (kGeneral) {
#pragma unroll 1
      for (; n >= part.full_last; --n) step(tile::True{});
#pragma unroll 1
      for (; n >= part.first; --n) step(tile::False{});
    } else {
      if constexpr (kCausal) {
#pragma unroll 1
        for (; n >= part.full_last; --n) step(tile::True{});
      }
#pragma unroll 1
      for (; n >= 0; --n) step(tile::False{});
    }
    c.q_ring.advance();

    // The last product with V, and with it the first scores of the next tile. While this V is held, no more K than the ring
    // has may be let pass. Where the next tile does not begin here, what is multiplied means nothing.
    c.wait_v();
    hopper::wgmma_fence();
    multiply_values(out, probabilities, shared.v(c.v_ring.stage));
    const Work work = c.work();
    const int after = kGeneral ? part.first - ptx::uniform(work.first) : 0;  // key blocks of the tile that are passed
    c.close();
    Part next = c.open();
    begun = next.exists && !next.empty() && after + next.before < kStages;
    if (begun) {
      c.wait_q();
      next.before += after;
      c.pass_k(next.before);
      c.wait_k();
    }
    multiply_scores(s, shared.q(c.q_ring.stage, group), shared.k(c.k_ring.stage));
    hopper::wgmma_wait<1>();
    hopper::hold(out);
    c.release_v();
    c.finish(work, out, row_max, row_sum);
    if (!begun) {
      hopper::wgmma_wait<0>();
      hopper::hold(s);
      c.pass(after);
    }
    part = next;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    flash_fwd(const __grid_constant__ flash_attn::FwdTmaParams p) {
  const Shared shared{ptx::shared_address(shared_memory)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQueryStages * kConsumers; ++i) {
      hopper::barrier_init(shared.q_full(0, i), 1);
      hopper::barrier_init(shared.q_empty(0, i), 4);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::barrier_init(shared.k_full(stage), 1);
      hopper::barrier_init(shared.v_full(stage), 1);
      hopper::barrier_init(shared.k_empty(stage), 4 * kConsumers);
      hopper::barrier_init(shared.v_empty(stage), 4 * kConsumers);
    }
    for (int i = 0; i < kWorks; ++i) {
      hopper::barrier_init(shared.work_full(i), 1);
      hopper::barrier_init(shared.work_empty(i), 128 * kConsumers + 1);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();

  if (threadIdx.x < 128) {
    hopper::give_registers<kProducerRegisters>();
    ptx::wait_on_dependencies();
    if (threadIdx.x == 0) {
      hopper::prefetch_map(p.q_map);
      hopper::prefetch_map(p.k_map);
      hopper::prefetch_map(p.v_map);
      load(p, shared);
    } else if (threadIdx.x / 32 == 1) {
      schedule(p, shared, threadIdx.x % 32);
    }
  } else {
    hopper::take_registers<kConsumerRegisters>();
    consume(p, shared);
  }
}
