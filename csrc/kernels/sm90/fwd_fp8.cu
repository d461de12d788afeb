// FP8 attention forward for Hopper (sm_90a): e4m3 Q, K and V with a factor per (batch, KV head) or, in mask kind general,
// per 64 rows of a head; bf16 output, fp32 log-sum-exp.
//
// Built as fwd.cu is: a producer warp, consumer warpgroups of 64 query rows, tiles dealt in rounds. What FP8 changes:
//   - Its products take both operands by columns, so flash_transpose_v first writes V into tiles in shared memory's order,
//     keys permuted such that an accumulator of Q K^T, packed, is an operand of P V: no shuffles.
//   - Its accumulators keep 14 bits, so the values of one key block are summed in a fresh one and added to the output in
//     fp32. It takes the registers of the scores: a warpgroup has no product of its own under its softmax, only others'.
//     With head dim 128 two consumers take turns, one's softmax under the other's products, which last about as long; for
//     mask kinds full and causal these are the kernels of fwd_fp8_turns.cu.
//   - The softmax is what takes the time, by its number of instructions. P is 2 to the power of score - base, where a
//     row's base puts its largest P to 2^kHeadroom, well into the range of e4m3, and is raised when a later P may pass
//     448. That is read off the sums of P, so that most blocks need no maximum.
//   - Factors of 64 rows (kGeneral): those of Q and K scale the scores. Those of V become part of P, by their logarithm in
//     the exponent, before the base is chosen: what is rounded to e4m3 is then as large as what it adds to the output. The
//     sums of P take them off again.
#include "sm90/fwd_fp8.cuh"

namespace fp8 {

constexpr bool kTurns = FA_TURNS;  // two consumers take turns at the softmax
constexpr bool kEarly = FA_EARLY;  // the next block's scores are begun before the last values are added
static_assert(!kTurns || kConsumers == 2);
static_assert(!kEarly || kGeneral);  // whose blocks may all be masked
// A thread sums its kBlockN / 4 P of a row in four parts: if no part passes kLargest, no P does. The parts of a row
// whose base is new do not.
static_assert(kBlockN / 16 * 32 <= 448);

// With kTurns, a consumer's turn is its softmax. Both have the same key blocks, and so as many turns. The compiler moves
// arithmetic past a barrier, all of the softmax if it likes, unless one depends on the other: a wait ends with a zero from
// memory, which is added to the bases of the scores, and a turn with a probability, which is more than -1.
__device__ __forceinline__ float wait_for_turn(const Barriers& barriers, int group) {
  if constexpr (!kTurns) return 0.0f;
  hopper::named_sync(1 + group, 256);
  return ptx::load_shared_float(barriers.zero());
}

// P = 2^x as operands of P V, and its sums by rows, in which P is without V's factors. Returns whether all of this thread's
// P are surely at most kLargest.
template <bool kGiveTurn>
__device__ __forceinline__ bool exponentials(unsigned (&probabilities)[kSteps][4], float (&sum)[2],
                                             const float (&x)[kScores], const Factors& factors, int group) {
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
      if (kGiveTurn && pair == kBlockN / 16 - 1 && half == 1) give_turn(group, p[3]);
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
    auto larger = [&](int j) { return fmaxf(x[4 * j + 2 * half], x[4 * j + 2 * half + 1]); };
    float up = raise_row(larger, base[half], factor[half]);
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
                                        float zero, int group) {
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
    exponentials<kTurns>(probabilities, sum, s, factors, group);
  } else {
    const bool fits = exponentials<kTurns>(probabilities, sum, s, factors, group) && !unset;
    if (!__all_sync(0xffffffffu, fits)) {
      raise_base(s, base, factor);
      rescale(out, row_sum, factor);
      exponentials<false>(probabilities, sum, s, factors, group);
    }
  }
  row_sum[0] += sum[0];
  row_sum[1] += sum[1];
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
  const int group = ptx::uniform(threadIdx.x / 128) - 1;
  const int thread = threadIdx.x % 128;
  const int lane = thread % 32;
  const int warp = thread / 32;
  const unsigned q_tile = shared_q + group * 64 * kRowBytes;
  hopper::Ring<kStages> k_ring, v_ring;
  int q_phase = 0;
  const int my_row = group * 64 + warp * 16 + lane / 4;
  if (kTurns && group == 1) give_turn(group, 0.0f);

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
        multiply_scores(s, q_tile, operand(shared_k + k_ring.stage * kKeyBytes));
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
        const float zero = wait_for_turn(barriers, group);
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
        softmax<kMasked>(probabilities, s, base, row_sum, out, factors, zero, group);
        float values[kValueBuffers][kValueColumns / 2];
        const unsigned v_tile = shared_v + v_ring.stage * kKeyBytes;
        hopper::barrier_wait(barriers.v_full(v_ring.stage), v_ring.phase);
        hopper::wgmma_fence();
#pragma unroll
        for (int chunk = 0; chunk < kValueBuffers; ++chunk) {
          multiply_values<0, kSteps>(values[chunk], probabilities, v_tile, chunk);
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
            multiply_values<0, kSteps>(sums, probabilities, v_tile, chunk + kValueBuffers);
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
      if constexpr (kEarly) step(n, tile::True{}, tile::True{});
      if (lane == 0) hopper::barrier_arrive(barriers.q_empty());
    }

    write_rows(params, work, out, base, row_sum, shared_out, group, warp, lane, my_row, rows);
  }
}

}  // namespace fp8
