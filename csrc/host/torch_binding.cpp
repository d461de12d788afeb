// The attention operators of flash_attn for CUDA tensors: from torch's tensors to a launch, and back.
//
// The schemas are defined in Python; loading the library (torch.ops.load_library) registers these implementations:
//   fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor out, Tensor lse)
//   fwd.output(Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None) -> Tensor out
//   bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, bool causal,
//       bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)
//   fwd_general(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q,
//       Tensor? seqused_k, Tensor? leftpad_k, Tensor? block_table, Tensor? alibi_slopes, Tensor? sink, Tensor? rng_state,
//       SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right,
//       int attention_chunk, float softcap, float dropout_p, int sm_margin) -> (Tensor out, Tensor lse)
//   fwd_general.output(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q,
//       SymInt max_seqlen_k, bool causal=False, float? softmax_scale=None) -> Tensor out
//   bwd_general(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor(a!) dq,
//       Tensor(b!) dk, Tensor(c!) dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k,
//       Tensor? leftpad_k, Tensor? alibi_slopes, Tensor? sink, Tensor? rng_state, SymInt max_seqlen_q,
//       SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right, int attention_chunk,
//       float softcap, float dropout_p, int sm_margin, bool deterministic) -> ()
//   fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? cu_seqlens_q,
//       Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, Tensor? sink, SymInt max_seqlen_q,
//       SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right, int attention_chunk,
//       float softcap, int sm_margin) -> (Tensor out, Tensor lse)
//   fwd_fp8.output(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,
//       bool causal=False, float? softmax_scale=None) -> Tensor out
//   fwd_rounded(Tensor q, Tensor k, Tensor v, bool causal, int key, bool smooth_k, bool smooth_v,
//       float? softmax_scale=None) -> Tensor out:
//       FP8 attention of fp16 or bf16 tensors, rounded with the signs of `key` (negative: not rotated), k and v less
//       their means, of which that of v is added to out
// An overload `output` is the call that is usual in inference: what it leaves out costs the host more time than the rest.
// Its scale, if not given, is 1 / sqrt(D).
// q and dq are (B, Sq, H, D), out and dout (B, Sq, H, Dv), k and dk (B, Sk, Hk, D), v and dv (B, Sk, Hk, Dv), all of one
// dtype, fp16 or bf16; of fwd_fp8, q, k and v are e4m3, out is bf16, and descales are fp32 (B, Hk) or, of blocks of rows,
// (B, heads, blocks), packed (1, heads, blocks). lse and dlse are fp32 (B, H, Sq). With cu_seqlens_q the queries are packed, (T, H, D), and lse is
// (H, T); with cu_seqlens_k so are the keys. Tensors may have any strides; new ones are contiguous.
//
// Built by g++ alone, without torch and without CUDA; buildtools/host.py holds the commands. The link is against an
// empty library named libtorch.so, so that the loader resolves torch's functions from the torch that is running.
#include <cstdint>

#include "host/dispatch.h"
#include "host/error.h"
#include "host/torch_shim.h"
#include "host/torch_cache.h"
#include "host/torch_tensor.h"

namespace flash_attn {

namespace {

// What the general operators have beyond the tensors of attention.
struct Options {
  Tensor cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, leftpad_k, block_table, alibi_slopes, sink, rng_state;
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;  // of packed sequences
  double softmax_scale = 0;
  ScoreRequest scores;
  int64_t sm_margin = 0;

  void read(Arguments& arguments, bool has_block_table) {
    cu_seqlens_q = arguments.optional_tensor();
    cu_seqlens_k = arguments.optional_tensor();
    seqused_q = arguments.optional_tensor();
    seqused_k = arguments.optional_tensor();
    leftpad_k = arguments.optional_tensor();
    if (has_block_table) block_table = arguments.optional_tensor();
    alibi_slopes = arguments.optional_tensor();
    sink = arguments.optional_tensor();
    rng_state = arguments.optional_tensor();
    max_seqlen_q = arguments.integer();
    max_seqlen_k = arguments.integer();
    softmax_scale = arguments.real();
    scores.causal = arguments.boolean();
    scores.window_left = arguments.integer();
    scores.window_right = arguments.integer();
    scores.chunk = arguments.integer();
    scores.softcap = arguments.real();
    scores.dropout_p = arguments.real();
    sm_margin = arguments.integer();
  }
};

// The problem that the arguments pose, checked: what would make a kernel read or write out of place does not pass.
struct Problem {
  Rows q, k, v;
  int64_t batch, seqlen_q, seqlen_k;  // lengths: the longest
  double softmax_scale;
  int64_t sm_margin = 0;
  Mask mask;
  Sequences sequences = {};
  ScoreModifiers modifiers = {};
  // Rows that no kernel writes are to be cleared.
  bool clear_queries = false;
  bool clear_keys = false;
  Tensor alibi_copy, sink_copy;

  int64_t heads() const { return q.sizes[2]; }
  int64_t heads_kv() const { return k.sizes[2]; }
  int64_t head_dim() const { return q.sizes[3]; }
  int64_t head_dim_v() const { return v.sizes[3]; }
  int32_t dtype() const { return q.argument.dtype; }
  int64_t step() const { return row_step(dtype()); }
  int32_t device() const { return q.argument.device; }
  int64_t query_rows() const { return q.sizes[0] * q.sizes[1]; }
  int64_t key_rows() const { return k.sizes[0] * k.sizes[1]; }
  int64_t lse_rank() const { return q.packed() ? 2 : 3; }
};

// Shapes, dtypes, devices and counts of q, k and v. `p` holds the three and its batch and lengths.
void check_problem(const Problem& p, bool fp8 = false) {
  check_same(p.k.argument, p.q.argument);
  check_same(p.v.argument, p.q.argument);
  if (fp8) {
    check_dtype(p.q.argument, constants().e4m3);
  } else if (p.dtype() != constants().fp16 && p.dtype() != constants().bf16) {
    fail("q is %s; float16 and bfloat16 are supported.", dtype_name(p.dtype()));
  }
  const int64_t key_batch = p.k.packed() ? 1 : p.batch;
  const int64_t key_shape[4] = {key_batch, p.k.sizes[1], p.heads_kv(), p.head_dim()};
  const int64_t value_shape[4] = {key_batch, p.k.sizes[1], p.heads_kv(), p.head_dim_v()};
  check_rows(p.k, key_shape);
  check_rows(p.v, value_shape);
  const Rows* const with_head_dim[] = {&p.q, &p.v};
  for (const Rows* const rows : with_head_dim) {
    if (rows->sizes[3] < 1 || rows->sizes[3] > kMaxHeadDim) {
      fail("%s has head_dim %lld; 1 to %d are supported.", rows->argument.name, static_cast<long long>(rows->sizes[3]),
           kMaxHeadDim);
    }
  }
  if (p.heads_kv() == 0 ? p.heads() != 0 : p.heads() % p.heads_kv() != 0) {
    fail("q has %lld heads, which is not a multiple of the %lld heads of k and v.", static_cast<long long>(p.heads()),
         static_cast<long long>(p.heads_kv()));
  }
  if (p.seqlen_q >= kMaxSeqlen || p.seqlen_k >= kMaxSeqlen || p.batch > INT32_MAX || p.heads() > INT32_MAX) {
    fail("batch %lld, sequence lengths %lld and %lld, or heads %lld are beyond what a kernel can count.",
         static_cast<long long>(p.batch), static_cast<long long>(p.seqlen_q), static_cast<long long>(p.seqlen_k),
         static_cast<long long>(p.heads()));
  }
}

// What fwd and bwd ask for, without any of the options.
void read_plain(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, double softmax_scale, bool causal) {
  p.q = read_rows("q", q, false);
  p.k = read_rows("k", k, false);
  p.v = read_rows("v", v, false);
  p.batch = p.q.sizes[0];
  p.seqlen_q = p.q.sizes[1];
  p.seqlen_k = p.k.sizes[1];
  p.softmax_scale = softmax_scale;
  p.mask = causal ? Mask::causal : Mask::full;
  check_problem(p);
}

int64_t longest(const char* name, int64_t max_seqlen, const Rows& rows) {
  if (!rows.packed()) return rows.sizes[1];
  if (max_seqlen < 0) fail("%s is %lld; it must not be negative.", name, static_cast<long long>(max_seqlen));
  // No sequence is longer than all of them together.
  return max_seqlen < rows.sizes[1] ? max_seqlen : rows.sizes[1];
}

void read_modifiers(Problem& p, const Options& options) {
  read_alibi_slopes(options.alibi_slopes, p.q.argument, p.batch, p.heads(), &p.modifiers, &p.alibi_copy);
  read_sink(options.sink, p.q.argument, p.heads(), &p.modifiers, &p.sink_copy);
  if (options.scores.dropout_p > 0) {
    if (!options.rng_state) fail("dropout_p is %g, but rng_state is None.", options.scores.dropout_p);
    const Argument state = read_argument("rng_state", options.rng_state);
    const int64_t seed_and_offset[1] = {2};
    check_shape(state, seed_and_offset, 1);
    check_dtype(state, constants().int64);
    check_device(state, p.q.argument);
    check_contiguous(state);
    p.modifiers.rng_state = static_cast<const unsigned long long*>(state.data);
  }
}

void read_general(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, const Options& options,
                  bool fp8 = false) {
  p.q = read_rows("q", q, static_cast<bool>(options.cu_seqlens_q));
  p.k = read_rows("k", k, static_cast<bool>(options.cu_seqlens_k));
  p.v = read_rows("v", v, static_cast<bool>(options.cu_seqlens_k));
  p.batch = p.q.sizes[0];
  if (options.cu_seqlens_q) {
    const Argument starts = read_argument("cu_seqlens_q", options.cu_seqlens_q);
    check_rank(starts, 1);
    if (starts.sizes[0] < 1) fail("cu_seqlens_q has shape (0), expected (batch + 1).");
    p.batch = starts.sizes[0] - 1;
  }
  p.seqlen_q = longest("max_seqlen_q", options.max_seqlen_q, p.q);
  p.seqlen_k = longest("max_seqlen_k", options.max_seqlen_k, p.k);
  p.softmax_scale = options.softmax_scale;
  p.sm_margin = options.sm_margin;
  check_problem(p, fp8);

  p.sequences.cu_seqlens_q = read_numbers("cu_seqlens_q", options.cu_seqlens_q, p.q.argument, p.batch + 1);
  p.sequences.cu_seqlens_k = read_numbers("cu_seqlens_k", options.cu_seqlens_k, p.q.argument, p.batch + 1);
  p.sequences.seqused_q = read_numbers("seqused_q", options.seqused_q, p.q.argument, p.batch);
  p.sequences.seqused_k = read_numbers("seqused_k", options.seqused_k, p.q.argument, p.batch);
  p.sequences.leftpad_k = read_numbers("leftpad_k", options.leftpad_k, p.q.argument, p.batch);
  read_modifiers(p, options);
  p.mask = choose_mask(options.scores, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k), &p.modifiers);
  // Rows past what is used; and packed rows, if there is no sequence that they could be of.
  p.clear_queries = options.seqused_q || p.batch == 0 || p.seqlen_q == 0;
  p.clear_keys = options.seqused_k || options.leftpad_k || p.batch == 0 || p.seqlen_k == 0;
}

const Kernel& kernel_for(Op op, const Problem& p, Preference preference) {
  KernelQuery query;
  query.preference = preference;
  query.op = op;
  query.dtype = p.dtype() == constants().bf16 ? Dtype::bf16 : p.dtype() == constants().fp16 ? Dtype::fp16 : Dtype::e4m3;
  query.mask = op == Op::round ? Mask::general : p.mask;
  query.head_dim = static_cast<int>(padded(p.head_dim() > p.head_dim_v() ? p.head_dim() : p.head_dim_v(), p.step()));
  query.device = p.device();
  return resolve(query);
}

Preference preference_of(const Problem& p) {
  if (p.modifiers.alibi_slopes != nullptr || p.modifiers.rng_state != nullptr) return Preference::every_feature;
  // Measured on an H200: with fewer scores, the faster kernel saves less than tensor maps cost the host and the start.
  constexpr int64_t kFewScores = int64_t{1} << 21;
  return p.batch * p.heads() * p.seqlen_q * p.seqlen_k < kFewScores ? Preference::latency : Preference::throughput;
}

template <typename Params>
void set_problem(Params& params, const Problem& p) {
  params.batch = static_cast<int>(p.batch);
  params.heads = static_cast<int>(p.heads());
  params.heads_kv = static_cast<int>(p.heads_kv());
  params.seqlen_q = static_cast<int>(p.seqlen_q);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  params.head_dim = static_cast<int>(padded(p.head_dim(), p.step()));
  params.head_dim_v = static_cast<int>(padded(p.head_dim_v(), p.step()));
  params.scale = static_cast<float>(p.softmax_scale);
  params.lse_batch_stride = p.q.packed() ? 0 : p.heads() * p.q.sizes[1];
  params.lse_head_stride = p.q.sizes[1];
  params.sequences = p.sequences;
  params.modifiers = p.modifiers;
}

// The forward's results while they are made: out, and lse where it is wanted.
struct Results {
  Results(const Problem& p, int32_t dtype, bool wants_lse)
      : out({p.q.sizes[0], p.q.sizes[1], p.heads(), p.head_dim_v()}, p.q.packed(), dtype, p.device(), p.step()),
        lse_count(p.query_rows() * p.heads()),
        wants_lse(wants_lse) {
    if (wants_lse) make_lse(p);
  }

  void make_lse(const Problem& p) {
    const int64_t lse_sizes[3] = {p.batch, p.heads(), p.q.sizes[1]};
    const int64_t lse_rank = p.lse_rank();
    lse = empty(lse_sizes + 3 - lse_rank, lse_rank, constants().fp32, p.device());
  }

  // Sets what the forward kernels are given, and clears rows that they do not write.
  void set(FwdParams& params, const Problem& p, const Kernel& kernel, CUstream stream) const {
    set_problem(params, p);
    params.out = out.data();
    params.lse = lse ? static_cast<float*>(data_of(lse)) : nullptr;
    params.out_stride = out.strides();
    if (p.clear_queries) {
      out.zero();
      if (lse) fill_minus_infinity(kernel, params.lse, lse_count, stream);
    }
  }

  // Puts out, and lse if it is wanted, where the results go.
  void give(StableIValue* stack) {
    Tensor result = out.take();
    stack[0] = box(result);
    if (wants_lse) stack[1] = box(lse);
  }

  Output out;
  int64_t lse_count;
  bool wants_lse;
  Tensor lse;
};

void set_inputs(FwdParams& params, const Input& q, const Input& k, const Input& v) {
  params.q = q.data();
  params.k = k.data();
  params.v = v.data();
  params.q_stride = q.strides();
  params.k_stride = k.strides();
  params.v_stride = v.strides();
}

void forward(const Problem& p, bool wants_lse, StableIValue* stack) {
  Results results(p, p.dtype(), wants_lse);
  if (results.lse_count > 0) {
    const Kernel& kernel = kernel_for(Op::fwd, p, preference_of(p));
    // The other family's kernels, which small problems get, can do without.
    if (!wants_lse && kernel.tensor_maps) results.make_lse(p);
    const Input q(p.q), k(p.k), v(p.v);
    const CUstream stream = current_stream(p.device());
    FwdParams params;
    results.set(params, p, kernel, stream);
    set_inputs(params, q, k, v);
    TileOptions tiles;
    tiles.sm_margin = p.sm_margin;
    Tensor counter;  // freed right after the launch: the allocator hands memory on in stream order
    if (wants_tile_counter(kernel, params)) {
      const int64_t one[1] = {1};
      counter = empty(one, 1, constants().int32, p.device());
      tiles.counter = static_cast<int*>(data_of(counter));
    }
    if (!launch_fwd(kernel, params, p.k.sizes[1], tiles, stream)) {
      launch_fwd(kernel_for(Op::fwd, p, Preference::every_feature), params, p.k.sizes[1], tiles, stream);
    }
  }
  results.give(stack);
}

// The factors of FP8 tensors.
struct Descales {
  Descale q, k, v;
  Tensor copies[3];
};

// `v_mean`: see FwdFp8Params.
void forward_fp8(const Problem& p, const Descales& descales, const float* v_mean, bool wants_lse, StableIValue* stack) {
  Results results(p, constants().bf16, wants_lse);
  if (results.lse_count > 0) {
    const Kernel& kernel = kernel_for(Op::fwd, p, Preference::throughput);
    Input q(p.q), k(p.k);
    const Input v(p.v);
    const CUstream stream = current_stream(p.device());
    FwdFp8Params params;
    FwdParams& fwd = params.tma.fwd;
    results.set(fwd, p, kernel, stream);
    set_inputs(fwd, q, k, v);
    params.q_descale = descales.q;
    params.k_descale = descales.k;
    params.v_descale = descales.v;
    params.v_mean = v_mean;
    // Freed right after the launch, as the backward's. The log-sum-exp that nobody wants lies before the values.
    const int64_t lse_bytes = wants_lse ? 0 : padded(results.lse_count * 4, 128);
    const int64_t workspace_size[1] = {lse_bytes + fp8_workspace(kernel, params, p.k.sizes[1])};
    const Tensor workspace = empty(workspace_size, 1, constants().e4m3, p.device());
    unsigned char* const memory = static_cast<unsigned char*>(data_of(workspace));
    if (!wants_lse) fwd.lse = reinterpret_cast<float*>(memory);
    params.v_tiles = memory + lse_bytes;
    if (!launch_fwd_fp8(kernel, params, p.k.sizes[1], p.sm_margin, stream)) {
      // Strides that have no tensor map, such as those of an expanded tensor. No other family has FP8.
      q.copy(p.q);
      k.copy(p.k);
      set_inputs(fwd, q, k, v);
      if (!launch_fwd_fp8(kernel, params, p.k.sizes[1], p.sm_margin, stream)) fail("q and k cannot be put into tensor maps.");
    }
  }
  results.give(stack);
}

// A tensor's rows in e4m3, contiguous, as they are going to be at `data`.
Rows rounded_rows(const Rows& rows, int64_t columns, const void* data) {
  Rows rounded = rows;
  rounded.argument.dtype = constants().e4m3;
  rounded.argument.data = data;
  rounded.sizes[3] = columns;
  rounded.strides[3] = 1;
  for (int i = 2; i >= 0; --i) rounded.strides[i] = rounded.strides[i + 1] * rounded.sizes[i + 1];
  return rounded;
}

// FP8 attention of 16-bit tensors. Throws where Python is to round them by other means: rows of an odd size or place,
// fewer columns than the kernel's, no such kernel, nothing to round.
void forward_rounded(const Problem& p, int64_t key, bool smooth_k, bool smooth_v, StableIValue* stack) {
  if (p.query_rows() * p.heads() == 0 || p.key_rows() == 0) fail("there is nothing to round.");
  const bool rotate = key >= 0;
  int64_t columns = rotate ? 64 : p.head_dim();  // of q and k
  while (columns < p.head_dim()) columns *= 2;

  const Rows* const sources[3] = {&p.q, &p.k, &p.v};
  int64_t bytes = 0, place[3];  // of the results, each on kAligned
  constexpr int64_t kAligned = 128;
  for (int i = 0; i < 3; ++i) {
    const Rows& rows = *sources[i];
    if (rows.sizes[3] % kRowStepFp8 != 0 || !usable_as_is(rows)) {
      fail("%s has rows that are not whole pieces of 32 bytes.", rows.argument.name);
    }
    place[i] = bytes;
    bytes += padded(rows.sizes[0] * rows.sizes[1] * rows.sizes[2] * (i < 2 ? columns : rows.sizes[3]), kAligned);
  }
  Problem rounded;
  rounded.q = rounded_rows(p.q, columns, nullptr);
  rounded.k = rounded_rows(p.k, columns, nullptr);
  rounded.v = rounded_rows(p.v, p.head_dim_v(), nullptr);
  rounded.batch = p.batch;
  rounded.seqlen_q = p.seqlen_q;
  rounded.seqlen_k = p.seqlen_k;
  rounded.softmax_scale = p.softmax_scale;
  rounded.mask = p.mask;
  const Kernel& kernel = kernel_for(Op::round, rounded, Preference::throughput);
  if (rotate && columns != kernel.record->head_dim) fail("k has fewer columns than v, and a kernel less.");

  Fp8RoundingParams params = {};
  for (int i = 0; i < 3; ++i) {
    Fp8RoundingTask& task = params.task[i];
    task.source = sources[i]->argument.data;
    task.stride = kernel_strides(*sources[i]);
    task.rows = static_cast<int>(sources[i]->sizes[1]);
    task.heads = static_cast<int>(sources[i]->sizes[2]);
    task.columns = static_cast<int>(sources[i]->sizes[3]);
    task.rotate = rotate && i < 2 ? 1 : 0;
    task.smooth = (i == 1 && smooth_k) || (i == 2 && smooth_v) ? 1 : 0;
  }
  params.batch = static_cast<int>(p.batch);
  params.heads_kv = static_cast<int>(p.heads_kv());
  params.bf16 = p.dtype() == constants().bf16 ? 1 : 0;
  params.key = static_cast<int>(rotate ? key : 0);
  // The square of _OUTLIER, and _SHARE, of flash_attn/fp8.py.
  params.outlier = 9.0f;
  params.share = 0.6f;
  const int64_t factors = int64_t{3} * params.batch * params.heads_kv;
  const int64_t means = p.batch * p.heads_kv() * kernel.record->head_dim;  // of k, and of v
  const int64_t floats = fp8_rounding_workspace(kernel, params);
  const int64_t memory_size[1] = {bytes + 4 * (2 * means + factors + floats)};
  const Tensor memory = empty(memory_size, 1, constants().e4m3, p.device());
  unsigned char* const data = static_cast<unsigned char*>(data_of(memory));
  params.means = reinterpret_cast<float*>(data + bytes);
  params.descale = params.means + 2 * means;
  params.sums = params.descale + factors;
  params.largest = params.sums + floats - factors;
  for (int i = 0; i < 3; ++i) params.task[i].destination = data + place[i];
  rounded.q.argument.data = data + place[0];
  rounded.k.argument.data = data + place[1];
  rounded.v.argument.data = data + place[2];
  launch_fp8_rounding(kernel, params, current_stream(p.device()));
  const int64_t heads_kv = p.heads_kv();
  const auto descale = [&](int i) { return Descale{params.descale + i * p.batch * heads_kv, heads_kv, 1, 0}; };
  const float* const v_mean = smooth_v ? params.means + means : nullptr;
  forward_fp8(rounded, {descale(0), descale(1), descale(2), {}}, v_mean, false, stack);
}

// The forward's results and what the backward is given for them.
struct Gradients {
  Rows dout, out;
  Argument lse;
  Tensor lse_copy, dlse_copy;
  const float* lse_data = nullptr;
  const float* dlse_data = nullptr;
};

const float* read_lse(const Argument& lse, const Problem& p, Tensor* copy) {
  const int64_t sizes[3] = {p.batch, p.heads(), p.q.sizes[1]};
  check_dtype(lse, constants().fp32);
  check_device(lse, p.q.argument);
  check_shape(lse, sizes + 3 - p.lse_rank(), p.lse_rank());
  return static_cast<const float*>(contiguous_as(lse, constants().fp32, copy));
}

void read_gradients(Gradients& g, const Problem& p, const Tensor& dout, const Tensor& out, const Tensor& lse,
                    const Tensor& dlse) {
  const int64_t out_sizes[4] = {p.q.sizes[0], p.q.sizes[1], p.heads(), p.head_dim_v()};
  g.dout = read_rows("dout", dout, p.q.packed());
  g.out = read_rows("out", out, p.q.packed());
  const Rows* const of_out[] = {&g.dout, &g.out};
  for (const Rows* const rows : of_out) {
    check_same(rows->argument, p.q.argument);
    check_rows(*rows, out_sizes);
  }
  g.lse_data = read_lse(read_argument("lse", lse), p, &g.lse_copy);
  if (dlse) g.dlse_data = read_lse(read_argument("dlse", dlse), p, &g.dlse_copy);
}

void backward(const Problem& p, const Gradients& g, Output& dq, Output& dk, Output& dv, bool deterministic) {
  // Without queries the keys' gradients are still to be cleared, and the other way round: the kernels do both.
  if (p.query_rows() * p.heads() + p.key_rows() * p.heads_kv() == 0) return;
  const Input dout(g.dout), q(p.q), k(p.k), v(p.v), out(g.out);
  BwdParams params;
  set_problem(params, p);
  params.dout = dout.data();
  params.q = q.data();
  params.k = k.data();
  params.v = v.data();
  params.out = out.data();
  params.lse = g.lse_data;
  params.dlse = g.dlse_data;
  params.dq = dq.data();
  params.dk = dk.data();
  params.dv = dv.data();
  params.dout_stride = dout.strides();
  params.q_stride = q.strides();
  params.k_stride = k.strides();
  params.v_stride = v.strides();
  params.out_stride = out.strides();
  params.dq_stride = dq.strides();
  params.dk_stride = dk.strides();
  params.dv_stride = dv.strides();
  params.deterministic = deterministic ? 1 : 0;
  if (p.clear_queries) dq.zero();
  if (p.clear_keys) {
    dk.zero();
    dv.zero();
  }
  const auto launch = [&](const Kernel& kernel) {
    const BwdWorkspace workspace = bwd_workspace(kernel, params, p.q.sizes[1]);
    // Freed right after the launch: the allocator hands memory on in stream order.
    const int64_t buffer_size[1] = {workspace.total};
    const Tensor buffer = empty(buffer_size, 1, constants().fp32, p.device());
    return launch_bwd(kernel, params, workspace, static_cast<float*>(data_of(buffer)), p.k.sizes[1],
                      current_stream(p.device()));
  };
  if (!launch(kernel_for(Op::bwd, p, preference_of(p)))) launch(kernel_for(Op::bwd, p, Preference::every_feature));
}

// ---- The operators. The stack's inputs are ours to free; torch reads the outputs from the same slots. ----

void fwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const double softmax_scale = arguments.real();
  const bool causal = arguments.boolean();

  Problem problem;
  read_plain(problem, q, k, v, softmax_scale, causal);
  forward(problem, true, stack);
}

// What is left to do of a call that Python has not looked at: what Python refuses, and the scale, 0 if none is given.
void complete_output_call(Problem& p) {
  if (p.heads_kv() == 0) fail("k has no heads.");
  if (p.softmax_scale == 0) p.softmax_scale = usual_scale(p.q);
}

void fwd_output(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const bool causal = arguments.boolean();
  double softmax_scale = 0;
  arguments.optional_real(&softmax_scale);

  Problem problem;
  read_plain(problem, q, k, v, softmax_scale, causal);
  complete_output_call(problem);
  forward(problem, false, stack);
}

void fwd_general(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  Options options;
  options.read(arguments, true);

  if (options.block_table) fail("block_table: the forward operator has no paging; use the operator for KV caches.");
  Problem problem;
  read_general(problem, q, k, v, options);
  forward(problem, true, stack);
}

void fwd_general_output(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  Options options;
  options.cu_seqlens_q = arguments.tensor();
  options.cu_seqlens_k = arguments.tensor();
  options.max_seqlen_q = arguments.integer();
  options.max_seqlen_k = arguments.integer();
  options.scores.causal = arguments.boolean();
  arguments.optional_real(&options.softmax_scale);

  Problem problem;
  read_general(problem, q, k, v, options);
  complete_output_call(problem);
  forward(problem, false, stack);
}

// Factors of blocks make the problem one of mask kind general.
Descales read_descales(Problem& p, const Tensor& q_descale, const Tensor& k_descale, const Tensor& v_descale) {
  Descales descales;
  Tensor* const copies = descales.copies;
  descales.q = read_descale("q_descale", q_descale, p.q, p.batch, p.heads_kv(), &copies[0]);
  descales.k = read_descale("k_descale", k_descale, p.k, p.batch, p.heads_kv(), &copies[1]);
  descales.v = read_descale("v_descale", v_descale, p.v, p.batch, p.heads_kv(), &copies[2]);
  if (descales.q.blocks + descales.k.blocks + descales.v.blocks > 0) p.mask = Mask::general;
  return descales;
}

void fwd_fp8(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor q_descale = arguments.optional_tensor();
  const Tensor k_descale = arguments.optional_tensor();
  const Tensor v_descale = arguments.optional_tensor();
  Options options;
  options.cu_seqlens_q = arguments.optional_tensor();
  options.cu_seqlens_k = arguments.optional_tensor();
  options.seqused_q = arguments.optional_tensor();
  options.seqused_k = arguments.optional_tensor();
  options.leftpad_k = arguments.optional_tensor();
  options.sink = arguments.optional_tensor();
  options.max_seqlen_q = arguments.integer();
  options.max_seqlen_k = arguments.integer();
  options.softmax_scale = arguments.real();
  options.scores.causal = arguments.boolean();
  options.scores.window_left = arguments.integer();
  options.scores.window_right = arguments.integer();
  options.scores.chunk = arguments.integer();
  options.scores.softcap = arguments.real();
  options.sm_margin = arguments.integer();

  Problem problem;
  read_general(problem, q, k, v, options, true);
  forward_fp8(problem, read_descales(problem, q_descale, k_descale, v_descale), nullptr, true, stack);
}

void fwd_fp8_output(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor q_descale = arguments.optional_tensor();
  const Tensor k_descale = arguments.optional_tensor();
  const Tensor v_descale = arguments.optional_tensor();
  Options options;
  options.scores.causal = arguments.boolean();
  arguments.optional_real(&options.softmax_scale);

  Problem problem;
  read_general(problem, q, k, v, options, true);
  complete_output_call(problem);
  forward_fp8(problem, read_descales(problem, q_descale, k_descale, v_descale), nullptr, false, stack);
}

void fwd_rounded(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const bool causal = arguments.boolean();
  const int64_t key = arguments.integer();
  const bool smooth_k = arguments.boolean();
  const bool smooth_v = arguments.boolean();
  double softmax_scale = 0;
  arguments.optional_real(&softmax_scale);

  Problem problem;
  read_plain(problem, q, k, v, softmax_scale, causal);
  complete_output_call(problem);
  forward_rounded(problem, key, smooth_k, smooth_v, stack);
}

void bwd(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor dout = arguments.tensor();
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor out = arguments.tensor();
  const Tensor lse = arguments.tensor();
  const double softmax_scale = arguments.real();
  const bool causal = arguments.boolean();
  const bool deterministic = arguments.boolean();

  Problem problem;
  read_plain(problem, q, k, v, softmax_scale, causal);
  Gradients gradients;
  read_gradients(gradients, problem, dout, out, lse, Tensor());
  Output dq(problem.q.sizes, false, problem.dtype(), problem.device());
  Output dk(problem.k.sizes, false, problem.dtype(), problem.device());
  Output dv(problem.v.sizes, false, problem.dtype(), problem.device());
  backward(problem, gradients, dq, dk, dv, deterministic);
  Tensor results[3] = {dq.take(), dk.take(), dv.take()};
  for (int i = 0; i < 3; ++i) stack[i] = box(results[i]);
}

// A gradient that the caller gives, to be written: of the shape, dtype and device of what it is the gradient of.
Output given(const char* name, const Tensor& tensor, const Rows& of) {
  const Rows rows = read_rows(name, tensor, of.packed());
  check_same(rows.argument, of.argument);
  check_rows(rows, of.sizes);
  return Output(rows);
}

void bwd_general(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor dout = arguments.tensor();
  const Tensor q = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor out = arguments.tensor();
  const Tensor lse = arguments.tensor();
  const Tensor dlse = arguments.optional_tensor();
  const Tensor dq_given = arguments.tensor();
  const Tensor dk_given = arguments.tensor();
  const Tensor dv_given = arguments.tensor();
  Options options;
  options.read(arguments, false);
  const bool deterministic = arguments.boolean();

  Problem problem;
  read_general(problem, q, k, v, options);
  Gradients gradients;
  read_gradients(gradients, problem, dout, out, lse, dlse);
  Output dq = given("dq", dq_given, problem.q);
  Output dk = given("dk", dk_given, problem.k);
  Output dv = given("dv", dv_given, problem.v);
  backward(problem, gradients, dq, dk, dv, deterministic);
  dq.finish();
  dk.finish();
  dv.finish();
}

// Registers the operators while the library is loaded, and takes them back before it goes. Where torch refuses (it logs
// why), calls find no CUDA implementation: an exception would end the process here, inside the loader.
class Registration {
 public:
  Registration() {
    if (aoti_torch_library_init_impl("flash_attn", "CUDA", "flash_attn/torch_binding.cpp", 0, &library_) != 0) return;
    torch_library_impl(library_, "fwd", &fwd, kTorchTargetVersion);
    torch_library_impl(library_, "fwd.output", &fwd_output, kTorchTargetVersion);
    torch_library_impl(library_, "bwd", &bwd, kTorchTargetVersion);
    torch_library_impl(library_, "fwd_general", &fwd_general, kTorchTargetVersion);
    torch_library_impl(library_, "fwd_general.output", &fwd_general_output, kTorchTargetVersion);
    torch_library_impl(library_, "bwd_general", &bwd_general, kTorchTargetVersion);
    torch_library_impl(library_, "fwd_fp8", &fwd_fp8, kTorchTargetVersion);
    torch_library_impl(library_, "fwd_fp8.output", &fwd_fp8_output, kTorchTargetVersion);
    torch_library_impl(library_, "fwd_rounded", &fwd_rounded, kTorchTargetVersion);
    torch_library_impl(library_, "decode", &decode, kTorchTargetVersion);
    torch_library_impl(library_, "decode.output", &decode_output, kTorchTargetVersion);
    torch_library_impl(library_, "kvcache", &kvcache, kTorchTargetVersion);
    torch_library_impl(library_, "kvcache.output", &kvcache_output, kTorchTargetVersion);
    torch_library_impl(library_, "rotary", &rotary, kTorchTargetVersion);
    torch_library_impl(library_, "append", &append, kTorchTargetVersion);
  }
  ~Registration() {
    if (library_ != nullptr) aoti_torch_delete_library_object(library_);
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

 private:
  TorchLibraryHandle library_ = nullptr;
};

const Registration registration;

}  // namespace

}  // namespace flash_attn
