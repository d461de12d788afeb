// FP8 attention forward for Hopper (sm_90a) with head dim 128, mask kinds full and causal. As fwd_fp8.cu is for mask kind
// general, where two consumers take turns at the softmax, but that a turn is made short:
//   - P V of the first keys is under way while the exponentials of the others are computed. A turn ends with the first
//     exponentials after that, so that there are always some to be computed.
//   - Whether all P fit is known before P V of the last keys is begun: for these it is read off the scores. If any P of a
//     warpgroup does not, it drops its products under way and works on the block again, from K and from its maximum. So no
//     scores are kept for that, and there are registers for P V of all columns in one product.
//   - The next scores are begun when the values are there, which are added under them.
#include "sm90/fwd_fp8.cuh"

namespace fp8 {

// Causal sequences of fewer key blocks take no turns: on an H200 those of 1,024 keys lose 3 % by them, of 4,096 they gain 5.
constexpr int kManyBlocks = 12;
constexpr int kFirstSteps = FA_EARLY;   // products of 32 keys of P V, under way under the softmax
constexpr int kTurn = 7;                // times 16: the keys of a turn
constexpr int kLate = 2;                // times 16: the last keys of a block, whose P are checked by their scores
constexpr int kFewKeys = 32;            // of a block: too few for a base that is likely to hold for the next
constexpr float kLargestLog2 = 8.807f;  // less than the logarithm of kLargest
static_assert(!kGeneral && kConsumers == 2 && kValueChunks == 1 && kTurn >= 2 * kFirstSteps);
// A thread sums its P of a row, but for the last keys, in four parts: if no part passes kLargest, no P does. The parts of
// a row whose base is new do not.
static_assert((kBlockN / 16 - kLate) * 32 <= 448);

// Both consumers have as many turns, one for each key block of the tile. The compiler moves arithmetic past a barrier, all of
// the softmax if it likes, unless one depends on the other: a turn is waited for before the scores are, and ends with a
// probability, which is more than -1. Without `turns` a consumer waits for its own warps alone, and gives nothing: so there is
// no branch, which the compiler would make more of.
__device__ __forceinline__ void wait_for_turn(bool turns, int group) {
  hopper::named_sync(turns ? 1 + group : 3 + group, turns ? 256 : 128);
}

// Whether all threads of a consumer say so.
__device__ __forceinline__ bool all_of_consumer(bool mine, int group) {
  int all;
  asm volatile(
      "{\n.reg .pred mine, all;\n"
      "setp.ne.b32 mine, %1, 0;\n"
      "barrier.cta.red.and.pred all, %2, 128, mine;\n"
      "selp.b32 %0, 1, 0, all;\n}"
      : "=r"(all)
      : "r"(static_cast<int>(mine)), "r"(5 + group)
      : "memory");
  return ptx::uniform(all) != 0;
}

// What P are 2 to the power of: raw scores times a factor, relative to the rows' bases.
struct Exponents {
  float factor;
  float added[2];

  __device__ __forceinline__ Exponents(float factor, const float (&base)[2]) : factor(factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) added[half] = base[half] == ptx::kMinusInfinity ? -0.0f : -base[half];
  }
  __device__ __forceinline__ float of(const float (&s)[kScores], int i) const {
    return fmaf(s[i], factor, added[i / 2 % 2]);
  }
};

// P, 2 to the power of x(0), x(1), ..., as operands of P V, and its sums by rows. `first_steps` is called where their P are
// there. Returns whether all P of this consumer are surely at most kLargest, and all its rows have a base.
template <typename X, typename FirstSteps>
__device__ __forceinline__ bool exponentials(unsigned (&probabilities)[kSteps][4], float (&sum)[2], X x,
                                             const float (&base)[2], bool turns, int group, FirstSteps first_steps) {
  float sums[2][4] = {};
  bool fits;
#pragma unroll
  for (int pair = 0; pair < kBlockN / 16; ++pair) {  // of 8-column groups
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = ptx::exp2(x(8 * pair + 4 * (i / 2) + 2 * half + i % 2));
        sums[half][i] += p[i];
      }
      probabilities[pair / 2][half + 2 * (pair % 2)] = ptx::pack_e4m3(p[0], p[1], p[2], p[3]);
      if (pair == kTurn - 1 && half == 1) give_turn(group, turns ? p[3] : -2.0f);
    }
    if (pair == 2 * kFirstSteps - 1) first_steps();
    if (pair == kBlockN / 16 - 1 - kLate) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, sums[i / 4][i % 4]);
      float late = ptx::kMinusInfinity;
#pragma unroll
      for (int i = 8 * pair + 8; i < kScores; ++i) late = fmaxf(late, x(i));
      const bool set = base[0] != ptx::kMinusInfinity && base[1] != ptx::kMinusInfinity;
      fits = all_of_consumer(largest <= kLargest && late <= kLargestLog2 && set, group);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = (sums[half][0] + sums[half][1]) + (sums[half][2] + sums[half][3]);
    asm volatile("" : "+f"(sum[half]));  // else the sums wait for the branch that follows, and the parts with them
  }
  return fits;
}

// Raises the rows' bases for a block of x, which are relative to them, and scales what there is so far to them.
template <typename X>
__device__ __forceinline__ void raise_base(X x, float (&base)[2], float (&row_sum)[2], float (&out)[kOutputs]) {
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto larger = [&](int j) { return fmaxf(x(4 * j + 2 * half), x(4 * j + 2 * half + 1)); };
    raise_row(larger, base[half], factor[half]);
    row_sum[half] *= factor[half];
  }
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) out[i] *= factor[i / 2 % 2];
}

// What a consumer's rows of a causal tile see.
struct OwnKeys {
  int last;  // key blocks [0, last) hold keys that some of the rows see
  int full;  // keys that all of them see

  __device__ __forceinline__ OwnKeys(const Work& work, int group) {
    const int first_row = work.first_row + group * 64;
    const int last_row = min(first_row + 64, work.sequence.seqlen_q) - 1;
    last = last_row < first_row ? 0 : max(0, work.mask.last(last_row) + kBlockN) / kBlockN;
    full = max(0, work.mask.last(first_row) + 1);
  }
};

// Leaves `count` key blocks to the other consumer; `turn` is called for each.
template <typename Turn>
__device__ __forceinline__ void leave_blocks(const Barriers& barriers, hopper::Ring<kStages>& k_ring,
                                             hopper::Ring<kStages>& v_ring, int count, Turn turn) {
  for (int i = 0; i < count; ++i) {
    hopper::barrier_wait(barriers.k_full(k_ring.stage), k_ring.phase);
    hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
    turn();
    if (threadIdx.x % 32 == 0) {
      hopper::barrier_arrive(barriers.k_empty(k_ring.stage));
      hopper::barrier_arrive(barriers.v_empty(v_ring.stage));
    }
    k_ring.advance();
    v_ring.advance();
  }
}

__device__ __forceinline__ void consume(const flash_attn::FwdFp8Params& params, const Barriers& barriers,
                                        unsigned shared_out, unsigned shared_q, unsigned shared_k, unsigned shared_v,
                                        int rounds) {
  const flash_attn::FwdParams& p = params.tma.fwd;
  const int group = ptx::uniform(threadIdx.x / 128) - 1;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const unsigned q_tile = shared_q + group * 64 * kRowBytes;
  hopper::Ring<kStages> k_ring, v_ring;
  int q_phase = 0;
  const int my_row = group * 64 + warp * 16 + lane / 4;
  const bool turns = !kCausal || params.blocks_n >= kManyBlocks;
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
      const float q_descale = factor_of(params.q_descale, work.batch, head_kv);
      const float k_descale = factor_of(params.k_descale, work.batch, head_kv);
      const float score_scale = positive_scale(p.scale_log2 * (q_descale * k_descale));
      const int row = work.first_row + my_row;
      const int key = lane % 4 * 2;
      hopper::barrier_wait(barriers.q_full(), q_phase);
      q_phase ^= 1;

      int last = work.last, full_last = work.full_last, raised_last = work.full_last;
      if constexpr (kCausal) {
        const OwnKeys own(work, group);
        leave_blocks(barriers, k_ring, v_ring, work.last - own.last, [&]() {
          wait_for_turn(turns, group);
          give_turn(group, turns ? 0.0f : -2.0f);
        });
        last = own.last;
        full_last = own.full / kBlockN;
        raised_last = own.full % kBlockN < kFewKeys ? full_last - 1 : full_last;
      }

      float s[kScores];
      int k_stage = 0;      // of the block whose scores are in `s`
      unsigned v_tile = 0;  // of the same block
      Exponents exponents(score_scale, base);
      auto x = [&](int i) { return exponents.of(s, i); };
      // Scores of the next block, begun after `between`.
      auto begin_scores = [&](auto between) {
        unsigned k_tile = static_cast<unsigned>(operand(shared_k + k_ring.stage * kKeyBytes));
        asm volatile("" : "+r"(k_tile));  // here, and not between the waits and the product
        hopper::barrier_wait(barriers.k_full(k_ring.stage), k_ring.phase);
        between();
        hopper::wgmma_fence();
        multiply_scores(s, q_tile, operand(0) >> 32 << 32 | k_tile);
      };
      auto finish_scores = [&]() {
        k_stage = k_ring.stage;
        k_ring.advance();
        v_tile = shared_v + v_ring.stage * kKeyBytes;
        asm volatile("" : "+r"(v_tile));
        hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
        wait_for_turn(turns, group);
        hopper::wgmma_wait<0>();
        hopper::hold(s);
      };
      auto scores_again = [&]() {
        int stage = k_stage;
        asm volatile("" : "+r"(stage));  // else all of this is prepared in every block
        hopper::wgmma_wait<0>();
        hopper::wgmma_fence();
        multiply_scores(s, q_tile, operand(shared_k + stage * kKeyBytes));
        hopper::wgmma_wait<0>();
        hopper::hold(s);
      };
      // Key block n, whose scores are there, and at the end those of the next, unless it is the last. With `raise` it starts
      // from its maximum, as does each that may be masked; else it tries the bases as they are.
      auto step = [&](int n, bool raise, auto is_last) {
        if (raise && n >= full_last) apply_mask(s, work.mask, row, n * kBlockN + key);
        auto raise_here = [&]() {
          exponents = Exponents(score_scale, base);
          raise_base(x, base, row_sum, out);
          exponents = Exponents(score_scale, base);
        };
        if (raise) raise_here();
        unsigned probabilities[kSteps][4];
        float values[kOutputs];
        float sum[2];
        auto first_steps = [&]() {
          hopper::wgmma_fence();
          multiply_values<0, kFirstSteps>(values, probabilities, v_tile, 0);
        };
        bool raised = raise, first = true;
#pragma unroll 1
        while (true) {
          const bool fits = exponentials(probabilities, sum, x, base, turns && first, group, first_steps);
          if (fits || raised) break;
          scores_again();
          raise_here();
          raised = true;
          first = false;  // the turn is over
        }
        row_sum[0] += sum[0];
        row_sum[1] += sum[1];
        hopper::wgmma_fence();
        multiply_values<kFirstSteps, kSteps>(values, probabilities, v_tile, 0);
        if (lane == 0) hopper::barrier_arrive(barriers.k_empty(k_stage));
        auto wait = [&]() {
          hopper::wgmma_wait<0>();
          hopper::hold(values);
        };
        if constexpr (decltype(is_last)::value) {
          wait();
        } else {
          begin_scores(wait);
        }
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) out[i] += values[i];
        if (lane == 0) hopper::barrier_arrive(barriers.v_empty(v_ring.stage));
        v_ring.advance();
        if constexpr (!decltype(is_last)::value) finish_scores();
      };
      int n = last - 1;
      if (n >= 0) {
        auto raises = [&](int n) { return n == last - 1 || (kCausal && n >= raised_last); };
        begin_scores([]() {});
        finish_scores();
        for (; n > 0; --n) step(n, raises(n), tile::False{});
        step(n, raises(n), tile::True{});
      }
      if (lane == 0) hopper::barrier_arrive(barriers.q_empty());
    }
    write_rows(params, work, out, base, row_sum, shared_out, group, warp, lane, my_row, rows);
  }
}

}  // namespace fp8
