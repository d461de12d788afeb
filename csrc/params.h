// The one contract between the host library and the kernels: what a launch is given.
//
// Plain C structs passed by value as the single kernel parameter. Both g++ and NVRTC read this file, so it includes
// nothing and uses only types whose size is the same on both sides. Strides are in elements; the last dimension is
// always contiguous and every row starts on 16 bytes. Lengths are below 2^30.
#pragma once

namespace flash_attn {

// Strides of a (batch, sequence, head, head_dim) tensor; batch is 0 where sequences are packed into (token, head, head_dim).
struct Strides {
  long long batch;
  long long row;
  long long head;
};

// Where the sequences of a batch lie. All null: every sequence has seqlen_q queries and seqlen_k keys of its own slab.
struct Sequences {
  const int* cu_seqlens_q;  // (B + 1): first row of each sequence in packed queries
  const int* cu_seqlens_k;  // (B + 1): the same of packed keys
  const int* seqused_q;     // (B): the queries of each sequence that count, from its first row on
  const int* seqused_k;     // (B): the same of keys
  const int* leftpad_k;     // (B): keys of each sequence that are skipped, at its beginning; none if negative
  int new_keys;             // counted on top of seqused_k
};

// What happens to the scores besides scaling. Read by the kernels of mask kind `general` alone.
struct ScoreModifiers {
  int window_left;    // query i sees keys from i + Sk - Sq - window_left; kUnlimited for no bound
  int window_right;   // and up to i + Sk - Sq + window_right
  int chunk;          // keys of the query's own chunk of this many positions; 0: none
  float softcap;      // c > 0: s becomes c tanh(s / c)
  const float* alibi_slopes;  // (B, H) or (H), fp32: s - slope |i + Sk - Sq - j|; null: none
  long long alibi_batch_stride;
  const float* sink;  // (H), fp32: a further logit of each row without a value; null: none
  // Dropout: keep where random >= drop_threshold, scaled by keep_scale. Null: none.
  const unsigned long long* rng_state;  // seed, offset, in device memory
  unsigned drop_threshold;              // dropout_p 2^32
  float keep_scale;                     // 1 / (1 - dropout_p)
};
constexpr int kUnlimited = (1 << 30) - 1;

// flash_fwd: O = softmax(scale * Q K^T) V and its log-sum-exp.
struct FwdParams {
  const void* q;  // (B, Sq, H, D)
  const void* k;  // (B, Sk, Hk, D)
  const void* v;  // (B, Sk, Hk, Dv)
  void* out;      // (B, Sq, H, Dv)
  float* lse;     // (B, H, Sq) or packed (H, T), natural logarithm; null: unwanted, of the sm80 family alone
  Strides q_stride, k_stride, v_stride, out_stride;
  long long lse_batch_stride;  // 0 if packed
  long long lse_head_stride;
  Sequences sequences;
  ScoreModifiers modifiers;
  int batch;
  int heads;
  int heads_kv;
  int group;  // query heads per KV head: heads / heads_kv
  int seqlen_q;  // the longest, if they differ
  int seqlen_k;
  int head_dim;    // D as the caller has it, a multiple of 8, at most FA_HEAD_DIM
  int head_dim_v;  // Dv, likewise
  int blocks_m;    // ceil(seqlen_q / block_m)
  float scale;       // softmax scale, positive
  float scale_log2;  // scale * log2(e): the softmax works in base 2
};

// flash_fwd of the sm90 family: tensor maps (CUtensorMap, 128 bytes) of q, k and v as (D, S, H, B), or (D, T, H, 1) if
// packed; boxes of 64 columns by 64 rows of q or block_n of k and v, 128-byte swizzle, zeros outside. The grid is at most one
// block an SM, each of which takes tiles of block_m queries until there are none.
struct FwdTmaParams {
  FwdParams fwd;
  int heads_per_group;  // (batch, head) pairs that come together, the longest tiles of all first
  int* next_tile;       // 0 at the launch: thread blocks take the tiles as they come; null: each has its share
  alignas(64) unsigned char q_map[128];
  alignas(64) unsigned char k_map[128];
  alignas(64) unsigned char v_map[128];
};

// What a quantised tensor's elements are multiplied by: a factor for each (batch, KV head), or one for each block of
// kDescaleRows rows of each of the tensor's own heads, for mask kind `general` alone. Blocks are counted from a sequence's
// first row in memory, whatever leftpad_k says. Block i of sequence b and head h has number (b * heads + h) * blocks + i;
// if packed, h * blocks + cu_seqlens[b] / kDescaleRows + b + i. No factor is negative; of 0, what it multiplies is 0.
constexpr int kDescaleRows = 64;
struct Descale {
  const float* data;  // null: 1
  long long batch;    // strides in elements of (batch, KV head); 0 where one factor serves all
  long long head;
  int blocks;         // of a head; 0: there are none
};

// flash_transpose_v and flash_fwd of dtype e4m3 (FP8), launched in this order on one stream: q, k and v are e4m3, out is
// bf16. Strides of q, k and v are in elements, which are bytes, and multiples of 16, as head_dim and head_dim_v are.
//
// tma.q_map and tma.k_map: boxes of min(128, FA_HEAD_DIM) columns, one byte each, by block_m or block_n rows; 128-byte
// swizzle, or 64-byte for FA_HEAD_DIM 64. tma.v_map is unused: FP8 products take V by columns only, so flash_transpose_v
// writes it into tiles of block_n keys in the very order of shared memory, zeros after a sequence's last key and after
// head_dim_v. Tile h * v_tiles_of_head + first(b) + n holds keys n * block_n and up of sequence b and KV head h, where
// first(b) is b * blocks_n, or cu_seqlens_k[b] / block_n + b if packed.
//
// flash_transpose_v: a block of fp8_transposers threads for each of batch * heads_kv * blocks_n tiles, no dynamic shared
// memory. flash_fwd may be launched as its programmatic dependent.
struct FwdFp8Params {
  FwdTmaParams tma;
  Descale q_descale, k_descale, v_descale;
  const float* v_mean;   // (B, Hk, FA_HEAD_DIM), added to the output of rows that see a key; null: nothing, as with a sink
  void* v_tiles;         // workspace: heads_kv * v_tiles_of_head * block_n * FA_HEAD_DIM bytes, on 128
  int v_tiles_of_head;   // batch * blocks_n, or total_k / block_n + batch if packed
  int blocks_n;          // ceil(seqlen_k / block_n)
};

// Threads of flash_transpose_v, each of which takes 4 keys and 16 columns at a time: as many as there are of these in a
// tile, or half as many, so that many blocks fit on a multiprocessor.
constexpr int fp8_transposers(int block_n, int head_dim) {
  return block_n * head_dim / 64 <= 384 ? block_n * head_dim / 64 : block_n * head_dim / 128;
}

// flash_round_sums, flash_round_largest and flash_round, launched in this order on one stream: 16-bit q, k and v to e4m3,
// with a factor for each sequence and KV head. q and k may be rotated, and the mean of a sequence's keys or values in a head
// taken off k or v first; flash_attn/fp8.py says in operations of torch what is computed. Each may be launched as a
// programmatic dependent. All have the record's threads, and no dynamic shared memory.
//
// Of q, k and v in this order. A warp has 16 rows of FA_HEAD_DIM or kFp8RotatedColumns columns, whichever are fewer, and the
// rows of a head are cut into tiles of kFp8RoundingPasses passes of a block; that works on tile t of head h of sequence b,
// with number first_block + (b * heads + h) * tiles + t.
constexpr int kFp8RoundingPasses = 8;
constexpr int kFp8RotatedColumns = 128;  // a row of more is rotated in pieces
struct Fp8RoundingTask {
  const void* source;  // (B, rows, heads, columns), fp16 or bf16; columns contiguous, rows on 16 bytes
  void* destination;   // (B, rows, heads, FA_HEAD_DIM if rotated, else columns), contiguous
  Strides stride;      // of source
  int rows;
  int heads;
  int columns;         // a multiple of 16, at most FA_HEAD_DIM
  int rotate;
  int smooth;          // of k and v: the mean of a sequence's rows is taken off each
  int tiles;
  int first_block;
};
struct Fp8RoundingParams {
  Fp8RoundingTask task[3];
  float* sums;     // (2, B, Hk, parts, FA_HEAD_DIM), workspace: of k and v
  float* means;    // (2, B, Hk, FA_HEAD_DIM), what is taken off k and v; written by flash_round_largest
  float* largest;  // (3, B, Hk), workspace
  float* descale;  // (3, B, Hk)
  int batch;
  int heads_kv;
  int bf16;        // of the sources
  int parts;       // of a sequence's rows, a block of flash_round_sums each, for k and v; 0: no mean, one block
  int key;         // of the signs
  float scale;     // of the rotation: the number of columns that are rotated together, ** -0.5
  float outlier;   // the square of how many times the root mean square of its row an outlier has
  float share;     // of an outlier's error, what each of two further roundings makes up for
};

// flash_bwd_preprocess, flash_bwd, flash_bwd_postprocess, launched in this order on one stream. Of the sm90 family, the second
// and third may be launched as programmatic dependents.
struct BwdParams {
  const void* dout;  // (B, Sq, H, Dv)
  const void* q;
  const void* k;
  const void* v;
  const void* out;   // (B, Sq, H, Dv), the forward's result
  const float* lse;  // the forward's
  const float* dlse;  // gradient of lse, laid out as lse; null: zero
  void* dq;          // (B, Sq, H, D)
  void* dk;          // (B, Sk, Hk, D)
  void* dv;          // (B, Sk, Hk, Dv)
  // Workspaces in tiles of block_m rows: tile h * total_tiles + first(b) + m holds rows m * block_m and up of sequence b,
  // where first(b) is b * blocks_m, or cu_seqlens_q[b] / block_m + b if packed. Written by preprocess, which also zeroes
  // dq_accum and the counters.
  float* dq_accum;    // (tiles, block_m, FA_HEAD_DIM) in the register order of flash_bwd's dQ tiles
  float* lse_log2;    // (tiles, block_m), lse * log2(e); +inf where a row is padding or sees no key
  float* delta;       // (tiles, block_m), rowsum(dO * O) - dlse; rows of both in the order of flash_bwd's threads
  int* dq_semaphore;  // (tiles), the key block whose turn it is (deterministic only)
  int* dq_finished;   // (B, Hk), how much of flash_bwd is done with each head (sm90 family only)
  int* next_block;    // how many key blocks were taken besides each thread block's own (likewise, if persistent)
  Strides dout_stride, q_stride, k_stride, v_stride, out_stride, dq_stride, dk_stride, dv_stride;
  long long lse_batch_stride;
  long long lse_head_stride;
  Sequences sequences;
  ScoreModifiers modifiers;
  int batch;
  int heads;
  int heads_kv;
  int group;
  int seqlen_q;
  int seqlen_k;
  int head_dim;
  int head_dim_v;
  int blocks_m;     // ceil(seqlen_q / block_m)
  int blocks_n;     // ceil(seqlen_k / block_n)
  int total_tiles;  // batch * blocks_m, or total_q / block_m + batch if packed
  int deterministic;  // 1: key blocks add to a dQ tile in ascending order
  float scale;
  float scale_log2;
};

// Whether a thread block of the sm90 family's flash_bwd goes from key block to key block, so that the grid may be of any size
// up to their number. As measured: what that saves between key blocks, other head dims lose within them, by more registers.
constexpr bool bwd_is_persistent(int head_dim) { return head_dim == 128; }

// flash_bwd of the sm90 family; the other two entry points read `bwd` alone. Tensor maps as those of FwdTmaParams, q and
// dout with boxes of block_m rows, k and v of block_n.
struct BwdTmaParams {
  BwdParams bwd;
  alignas(64) unsigned char q_map[128];
  alignas(64) unsigned char dout_map[128];
  alignas(64) unsigned char k_map[128];
  alignas(64) unsigned char v_map[128];
};

// n / d is n * multiplier >> shift, for any n from 0 up to below 2^31.
struct Divisor {
  unsigned multiplier;
  int shift;
};

// Keys and values in pages of page_size rows; a null table: in slabs, one a sequence.
struct Pages {
  const int* block_table;  // (B, pages of a sequence): the page that holds rows i * page_size and up
  long long table_batch_stride;
  int page_size;
  Divisor by_page_size;
  int page_count;  // pages there are; a table entry outside [0, page_count) is never followed
};

// flash_decode: attention of few queries with a KV cache, and flash_combine, which joins its splits. The query heads of a
// KV head and the query tokens are packed into rows: row r is token r / group, head r % group of its KV head. On GPUs that
// can, each is launched while the launch before it ends (programmatic dependent launch).
struct DecodeParams {
  const void* q;  // (B, Sq, H, D), or packed (T, H, D)
  const void* k;  // (Bc, capacity, Hk, D), or (pages, page_size, Hk, D)
  const void* v;  // likewise, Dv
  void* out;      // (B, Sq, H, Dv), or packed (T, H, Dv)
  float* lse;     // (B, H, Sq) or packed (H, T)
  float* partial_out;  // (splits, lse_count, Dv), rows as in lse, normalised within the split; unused with one split
  float* partial_lse;  // (splits, lse_count), base 2
  Strides q_stride, k_stride, v_stride, out_stride;
  long long lse_batch_stride;  // 0 if packed
  long long lse_head_stride;   // Sq or T
  long long lse_count;
  Sequences sequences;         // cu_seqlens_q; seqused_k + new_keys: the length of each cache, new keys included; leftpad_k
  const int* cache_batch_idx;  // (B): the slab of each sequence; null: its own
  int slabs;                   // Bc; a slab outside of [0, slabs) is never followed
  Pages pages;
  ScoreModifiers modifiers;  // no dropout
  int batch;
  int heads;
  int heads_kv;
  int group;
  int seqlen_q;  // the longest, if packed
  int seqlen_k;  // capacity, or a length that all sequences have
  int head_dim;
  int head_dim_v;
  int warps;      // of a block: a power of two, up to those of the record
  int row_warps;  // warps, of 16 rows each, that share their keys: a power of two, from block_m / 16 to `warps`
  int row_tiles;  // ceil(group * seqlen_q / (16 * row_warps))
  int splits;
  Divisor by_group, by_heads_kv, by_row_tiles, by_splits;
  float scale;
  float scale_log2;
};
constexpr int kCombineThreads = 64;  // of flash_combine, whatever the record has; a row for each warp

// flash_rotary: copies rows, rotated by their position or not, to their place: into a KV cache, or anywhere.
struct RotaryTask {
  const void* source;  // (B, S, H, D), or packed
  void* destination;
  Strides source_stride, destination_stride;
  int seqlen;    // rows of a sequence, the longest if packed
  int heads;
  int head_dim;
  int rotate;     // 0: copy
  int same_position;  // 1: every row has its sequence's offset as position
  int to_cache;   // 1: row i goes to row offset + i of the cache
};
struct RotaryParams {
  RotaryTask task[3];
  int tasks;
  const void* cos;  // (positions, rotary_dim / 2), contiguous, of the data's dtype, or fp32
  const void* sin;
  int positions;
  int rotary_dim;  // even, at most head_dim
  int interleaved;  // 1: pairs (0, 1), (2, 3), ...; 0: (0, rotary_dim / 2), ...
  int conjugate;    // 1: rotate back, for the backward pass
  int table_fp32;   // dtype of cos and sin
  const int* offsets;  // (B): position of each sequence's first row; null: offset
  int offset;
  const int* cu_seqlens;  // (B + 1): packed sources
  const int* leftpad;     // (B): rows of the cache before position 0; none if negative
  const int* cache_batch_idx;
  int slabs;
  Pages pages;
  int capacity;  // rows of the cache a sequence can have; rows past it are dropped
  int batch;
};

}  // namespace flash_attn
