// The one contract between the host library and the kernels: what a launch is given.
//
// Plain C structs passed by value as the single kernel parameter. Both g++ and NVRTC read this file, so it includes
// nothing and uses only types whose size is the same on both sides. Strides are in elements; the last dimension is
// always contiguous and every row starts on 16 bytes.
#pragma once

namespace flash_attn {

// Strides of a (batch, sequence, head, head_dim) tensor.
struct Strides {
  long long batch;
  long long row;
  long long head;
};

// flash_fwd: O = softmax(scale * Q K^T) V and its log-sum-exp.
struct FwdParams {
  const void* q;  // (B, Sq, H, D)
  const void* k;  // (B, Sk, Hk, D)
  const void* v;  // (B, Sk, Hk, D)
  void* out;      // (B, Sq, H, D)
  float* lse;     // (B, H, Sq), contiguous, natural logarithm
  Strides q_stride, k_stride, v_stride, out_stride;
  int batch;
  int heads;
  int heads_kv;
  int group;  // query heads per KV head: heads / heads_kv
  int seqlen_q;
  int seqlen_k;
  int head_dim;  // D as the caller has it, a multiple of 8, at most FA_HEAD_DIM
  int blocks_m;  // ceil(seqlen_q / block_m)
  float scale;       // softmax scale
  float scale_log2;  // scale * log2(e): the softmax works in base 2
};

// flash_bwd_preprocess, flash_bwd, flash_bwd_postprocess, launched in this order on one stream.
struct BwdParams {
  const void* dout;  // (B, Sq, H, D)
  const void* q;
  const void* k;
  const void* v;
  const void* out;   // (B, Sq, H, D), the forward's result
  const float* lse;  // (B, H, Sq), the forward's
  void* dq;          // (B, Sq, H, D)
  void* dk;          // (B, Sk, Hk, D)
  void* dv;          // (B, Sk, Hk, D)
  // Workspaces; Sq_r = blocks_m * block_m. Written by preprocess, which also zeroes dq_accum and dq_semaphore.
  float* dq_accum;    // (B, H, Sq_r, FA_HEAD_DIM) in the register order of flash_bwd's dQ tiles
  float* lse_log2;    // (B, H, Sq_r), lse * log2(e); +inf where a row is padding or sees no key
  float* delta;       // (B, H, Sq_r), rowsum(dO * O)
  int* dq_semaphore;  // (B, H, blocks_m), the key block whose turn it is (deterministic only)
  Strides dout_stride, q_stride, k_stride, v_stride, out_stride, dq_stride, dk_stride, dv_stride;
  int batch;
  int heads;
  int heads_kv;
  int group;
  int seqlen_q;
  int seqlen_k;
  int head_dim;
  int blocks_m;  // ceil(seqlen_q / block_m)
  int blocks_n;  // ceil(seqlen_k / block_n)
  int deterministic;  // 1: key blocks add to a dQ tile in ascending order
  float scale;
  float scale_log2;
};

}  // namespace flash_attn
