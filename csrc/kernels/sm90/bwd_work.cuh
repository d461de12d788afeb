// What a thread block of flash_bwd works on: a key block, and its walk over query blocks.
#pragma once

#include "common/problem.cuh"
#include "params.h"
#include "sm90/bwd_tiles.cuh"

namespace bwd {

using problem::kCausal;

// Thread blocks at the end of a causal launch that come the longest first, whatever their head: 512, about four an SM.
constexpr int kLog2LastBlocks = 9;

// The thread block's work: its keys, and the walk over the queries of every head of the group.
struct Work {
  int block_n, batch, head_kv, first_key;
  problem::Sequence sequence;
  problem::Mask mask;
  int keys;             // of this block that exist, if fewer than kBlockN
  int first_m, last_m;  // query blocks [first_m, last_m) see a key of this block
  int steps;

  __device__ __forceinline__ Work(const flash_attn::BwdParams& p, int head_index, int block)
      : block_n(block),
        batch(head_index / p.heads_kv),
        head_kv(head_index - batch * p.heads_kv),
        first_key(block_n * kBlockN),
        sequence(p, batch),
        mask(sequence, p.modifiers) {
    keys = sequence.seqlen_k - first_key;
    // Not past the tiles that the host has made room for, should max_seqlen_q be too small.
    last_m = min(p.blocks_m, (sequence.seqlen_q + kBlockM - 1) / kBlockM);
    first_m = max(0, mask.first_query(first_key)) / kBlockM;
    steps = max(0, last_m - first_m) * p.group;
  }

  // What the walk needs, where the compiler cannot know it to be the same for all threads of a warp.
  __device__ __forceinline__ void make_uniform() {
    block_n = ptx::uniform(block_n);
    batch = ptx::uniform(batch);
    head_kv = ptx::uniform(head_kv);
    first_key = ptx::uniform(first_key);
    sequence.seqlen_q = ptx::uniform(sequence.seqlen_q);
    mask.shift = ptx::uniform(mask.shift);
    keys = ptx::uniform(keys);
    first_m = ptx::uniform(first_m);
    last_m = ptx::uniform(last_m);
    steps = ptx::uniform(steps);
  }

  // Key blocks of a head are neighbours, so that its Q and dO stay in L2. Under a causal mask the first are the longest:
  // those of the last heads come by length, lest the last head's long ones end when everything else has.
  static __device__ __forceinline__ Work of(const flash_attn::BwdParams& p, int block) {
    int head_index = block / p.blocks_n;
    int block_n = block - head_index * p.blocks_n;
    if constexpr (kCausal) {
      // So many heads that it takes no division, which every thread would do twice.
      const int heads = p.batch * p.heads_kv;
      const int log2_last = min(31 - __clz(heads), max(0, kLog2LastBlocks - (32 - __clz(p.blocks_n - 1))));
      const int first_last = heads - (1 << log2_last);
      const int rest = block - first_last * p.blocks_n;
      if (rest >= 0) {
        head_index = first_last + (rest & ((1 << log2_last) - 1));
        block_n = rest >> log2_last;
      }
    }
    return Work(p, head_index, block_n);
  }
};

// A step of the walk: the query block, its head, and its tile of the workspaces.
struct Position {
  int head, m, tile;

  __device__ __forceinline__ Position(const flash_attn::BwdParams& p, const Work& work)
      : head(work.head_kv * p.group), m(work.first_m), tile(head * p.total_tiles + first_tile(p, work.batch) + m) {}

  __device__ __forceinline__ void advance(const flash_attn::BwdParams& p, const Work& work) {
    ++tile;
    if (++m == work.last_m) {
      m = work.first_m;
      ++head;
      tile += p.total_tiles - (work.last_m - work.first_m);
    }
  }
};

}  // namespace bwd
