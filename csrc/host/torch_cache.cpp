// The operators of KV caches and of rotary embeddings for CUDA tensors.
//
//   decode(Tensor q, Tensor k_cache, Tensor v_cache, OPTIONS, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0)
//       -> (Tensor out, Tensor lse)
//   kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cos, Tensor? sin,
//       bool interleaved, OPTIONS) -> (Tensor out, Tensor lse): append and decode in one
//   decode.output(Tensor q, Tensor k_cache, Tensor v_cache, USUAL) -> Tensor out
//   kvcache.output(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cos, Tensor? sin,
//       bool interleaved, USUAL) -> Tensor out
//   rotary(Tensor source, Tensor(a!) destination, Tensor cos, Tensor sin, Tensor? offsets, SymInt offset,
//       Tensor? cu_seqlens, SymInt max_seqlen, bool interleaved, bool conjugate) -> ()
//   append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? offsets, SymInt offset,
//       Tensor? cache_batch_idx, Tensor? block_table) -> ()
// OPTIONS: float softmax_scale, bool causal, Tensor? seqlens_k=None, SymInt seqlen_k=-1, Tensor? block_table=None,
//     int num_splits=0, int window_left=-1, int window_right=-1, Tensor? leftpad_k=None, Tensor? cache_batch_idx=None,
//     Tensor? alibi_slopes=None, Tensor? sink=None, int attention_chunk=0, float softcap=0.0
// USUAL: bool causal, Tensor? seqlens_k=None, SymInt seqlen_k=-1, Tensor? block_table=None, float? softmax_scale=None
// The overloads `output` are the calls that are usual in inference; their scale, if not given, is 1 / sqrt(D).
#include "host/torch_cache.h"

#include "host/dispatch.h"
#include "host/error.h"
#include "host/torch_tensor.h"

namespace flash_attn {

namespace {

// A cache as the kernels use it: where it is, or, if its rows are not ones that they can move, a copy of all of it.
class Cache {
 public:
  Cache(const char* name, const Tensor& tensor, const Argument& first, bool written)
      : rows(read_rows(name, tensor, false)) {
    check_same(rows.argument, first);
    for (int i = 0; written && i < 4; ++i) {
      if (rows.sizes[i] > 1 && rows.strides[i] == 0) {
        fail("%s of shape %s has strides %s; memory that several rows share cannot be written.", name,
             ShapeText(rows.sizes, 4).c_str(), ShapeText(rows.strides, 4).c_str());
      }
    }
    if (usable_as_is(rows)) {
      // Memory that is going to be written is asked for as such.
      data = written ? data_of(tensor) : const_cast<void*>(rows.argument.data);
      strides = kernel_strides(rows);
      return;
    }
    copy_ = PaddedRows(rows.sizes, false, rows.argument.dtype, rows.argument.device);
    copy_.copy_from(rows.argument.handle);
    if (copy_.has_padding()) copy_.zero_padding();
    data = copy_.data();
    strides = copy_.strides();
  }
  // Takes what was written over into the cache itself; called after the launch.
  void finish() const {
    if (copy_) copy_.copy_to(rows.argument.handle);
  }

  Rows rows;
  void* data = nullptr;
  Strides strides = {0, 0, 0};

 private:
  PaddedRows copy_;
};

// The pages of a cache, or none; `capacity` is what a sequence can hold.
Pages read_pages(const Tensor& tensor, const Rows& cache, int64_t batch, int64_t* capacity) {
  Pages pages = {};
  *capacity = cache.sizes[1];
  if (!tensor) return pages;
  const Argument table = read_argument("block_table", tensor);
  check_rank(table, 2);
  const int64_t expected[2] = {batch, table.sizes[1]};
  check_shape(table, expected, 2);
  check_dtype(table, constants().int32);
  check_device(table, cache.argument);
  if (cache.sizes[1] < 1) fail("%s has pages of no rows.", cache.argument.name);
  if (table.sizes[1] > 1 && table.strides[1] != 1) fail("block_table must have a contiguous last dimension.");
  pages.block_table = static_cast<const int*>(table.data);
  pages.table_batch_stride = table.strides[0];
  pages.page_size = static_cast<int>(cache.sizes[1]);
  pages.by_page_size = divisor(static_cast<unsigned>(pages.page_size));
  pages.page_count = static_cast<int>(cache.sizes[0]);
  *capacity = table.sizes[1] * cache.sizes[1];
  return pages;
}

// Without a table, a cache has a slab for each sequence, or cache_batch_idx says which.
void check_slabs(const Rows& cache, const Tensor& table, const Tensor& cache_batch_idx, int64_t batch) {
  if (table) {
    if (cache_batch_idx) fail("cache_batch_idx and block_table cannot be used together.");
    return;
  }
  if (!cache_batch_idx && cache.sizes[0] < batch) {
    fail("%s holds %lld sequences, and there are %lld.", cache.argument.name, static_cast<long long>(cache.sizes[0]),
         static_cast<long long>(batch));
  }
}

void check_capacity(int64_t capacity) {
  if (capacity >= kMaxSeqlen) {
    fail("a cache of %lld rows a sequence is beyond what a kernel can count.", static_cast<long long>(capacity));
  }
}

int clamp_window(int64_t window) {
  return window < 0 || window > kUnlimited ? kUnlimited : static_cast<int>(window);
}

Dtype kernel_dtype(const Argument& argument) {
  if (argument.dtype == constants().bf16) return Dtype::bf16;
  if (argument.dtype == constants().fp16) return Dtype::fp16;
  fail("%s is %s; float16 and bfloat16 are supported.", argument.name, dtype_name(argument.dtype));
}

// What attention with a cache is told besides q and the cache.
struct Options {
  Tensor seqlens_k, leftpad_k, cache_batch_idx, block_table, alibi_slopes, sink;
  int64_t seqlen_k = 0;  // without seqlens_k, the length of every cache; negative: the capacity
  double softmax_scale = 0, softcap = 0;
  bool causal = false;
  bool without_scale = false;  // none is given
  int64_t window_left = -1, window_right = -1, chunk = 0, num_splits = 0;

  void read_usual(Arguments& arguments) {
    causal = arguments.boolean();
    seqlens_k = arguments.optional_tensor();
    seqlen_k = arguments.integer();
    block_table = arguments.optional_tensor();
    arguments.optional_real(&softmax_scale);
    without_scale = softmax_scale == 0;
  }

  void read(Arguments& arguments) {
    softmax_scale = arguments.real();
    causal = arguments.boolean();
    seqlens_k = arguments.optional_tensor();
    seqlen_k = arguments.integer();
    block_table = arguments.optional_tensor();
    num_splits = arguments.integer();
    window_left = arguments.integer();
    window_right = arguments.integer();
    leftpad_k = arguments.optional_tensor();
    cache_batch_idx = arguments.optional_tensor();
    alibi_slopes = arguments.optional_tensor();
    sink = arguments.optional_tensor();
    chunk = arguments.integer();
    softcap = arguments.real();
  }
};

// A checked problem, ready but for where q and the results are.
struct Problem {
  DecodeParams params = {};
  const Kernel* kernel = nullptr;  // null where there is no row
  int64_t out_sizes[4] = {0, 0, 0, 0};
  bool packed = false;
  Tensor alibi_copy, sink_copy;

  int64_t partial_floats() const {
    return params.splits > 1 ? params.splits * params.lse_count * (params.head_dim_v + 1) : 0;
  }
};

// `new_rows` are appended to each cache before its keys are used, and do not count in its length yet.
void read_problem(Problem& problem, const Rows& q, const Cache& k_cache, const Cache& v_cache, const Tensor& cu_seqlens_q,
                  int64_t max_seqlen_q, const Options& options, int64_t new_rows) {
  const Rows& k = k_cache.rows;
  const Rows& v = v_cache.rows;
  problem.packed = q.packed();
  int64_t batch = q.sizes[0];
  int64_t seqlen_q = q.sizes[1];
  if (problem.packed) {
    const Argument starts = read_argument("cu_seqlens_q", cu_seqlens_q);
    check_rank(starts, 1);
    if (starts.sizes[0] < 1) fail("cu_seqlens_q has shape (0), expected (batch + 1).");
    batch = starts.sizes[0] - 1;
    if (max_seqlen_q < 0) fail("max_seqlen_q is %lld; it must not be negative.", static_cast<long long>(max_seqlen_q));
    if (max_seqlen_q < seqlen_q) seqlen_q = max_seqlen_q;
  }
  const int64_t heads = q.sizes[2], heads_kv = k.sizes[2];
  const int64_t k_shape[4] = {k.sizes[0], k.sizes[1], heads_kv, q.sizes[3]};
  const int64_t v_shape[4] = {k.sizes[0], k.sizes[1], heads_kv, v.sizes[3]};
  check_rows(k, k_shape);
  check_rows(v, v_shape);
  if (q.sizes[3] < 1 || q.sizes[3] > kMaxHeadDim || v.sizes[3] < 1 || v.sizes[3] > kMaxHeadDim) {
    fail("q has head_dim %lld and v_cache %lld; 1 to %d are supported.", static_cast<long long>(q.sizes[3]),
         static_cast<long long>(v.sizes[3]), kMaxHeadDim);
  }
  if (heads_kv == 0 ? heads != 0 : heads % heads_kv != 0) {
    fail("q has %lld heads, which is not a multiple of the %lld heads of k_cache.", static_cast<long long>(heads),
         static_cast<long long>(heads_kv));
  }
  check_slabs(k, options.block_table, options.cache_batch_idx, batch);

  problem.out_sizes[0] = q.sizes[0];
  problem.out_sizes[1] = q.sizes[1];
  problem.out_sizes[2] = heads;
  problem.out_sizes[3] = v.sizes[3];
  DecodeParams& params = problem.params;
  int64_t capacity = 0;
  params.pages = read_pages(options.block_table, k, batch, &capacity);
  check_capacity(capacity);
  if (heads_kv > 0) check_capacity(seqlen_q * heads / heads_kv);
  int64_t seqlen_k = capacity;
  if (!options.seqlens_k && options.seqlen_k >= 0) {
    seqlen_k = options.seqlen_k + new_rows;
    if (options.seqlen_k > capacity || seqlen_k > capacity) {
      fail("seqlen_k %lld and %lld new rows are more than a cache of %lld rows holds.",
           static_cast<long long>(options.seqlen_k), static_cast<long long>(new_rows), static_cast<long long>(capacity));
    }
  }
  read_alibi_slopes(options.alibi_slopes, q.argument, batch, heads, &params.modifiers, &problem.alibi_copy);
  read_sink(options.sink, q.argument, heads, &params.modifiers, &problem.sink_copy);
  params.modifiers.window_left = clamp_window(options.window_left);
  params.modifiers.window_right = options.causal ? 0 : clamp_window(options.window_right);
  params.modifiers.chunk = static_cast<int>(options.chunk > 0 && options.chunk < kMaxSeqlen ? options.chunk : 0);
  params.modifiers.softcap = static_cast<float>(options.softcap);
  params.sequences.cu_seqlens_q = read_numbers("cu_seqlens_q", cu_seqlens_q, q.argument, batch + 1);
  params.sequences.seqused_k = read_numbers("seqlens_k", options.seqlens_k, q.argument, batch);
  params.sequences.leftpad_k = read_numbers("leftpad_k", options.leftpad_k, q.argument, batch);
  params.sequences.new_keys = static_cast<int>(new_rows);
  params.cache_batch_idx = read_numbers("cache_batch_idx", options.cache_batch_idx, q.argument, batch);
  params.slabs = static_cast<int>(k.sizes[0]);
  params.k = k_cache.data;
  params.v = v_cache.data;
  params.k_stride = k_cache.strides;
  params.v_stride = v_cache.strides;
  params.lse_head_stride = q.sizes[1];
  params.lse_batch_stride = problem.packed ? 0 : heads * q.sizes[1];
  params.lse_count = q.sizes[0] * heads * q.sizes[1];
  params.batch = static_cast<int>(batch);
  params.heads = static_cast<int>(heads);
  params.heads_kv = static_cast<int>(heads_kv);
  params.seqlen_q = static_cast<int>(seqlen_q);
  params.seqlen_k = static_cast<int>(seqlen_k);
  params.head_dim = static_cast<int>(padded(q.sizes[3]));
  params.head_dim_v = static_cast<int>(padded(v.sizes[3]));
  params.scale = static_cast<float>(options.without_scale ? usual_scale(q) : options.softmax_scale);
  KernelQuery query = {};
  query.dtype = kernel_dtype(q.argument);  // of a problem without rows, too
  if (params.lse_count == 0) return;

  query.op = Op::decode;
  query.mask = Mask::general;
  query.head_dim = params.head_dim > params.head_dim_v ? params.head_dim : params.head_dim_v;
  query.device = q.argument.device;
  query.preference = decode_preference(params);
  problem.kernel = &resolve(query);
  params.splits = decode_splits(*problem.kernel, params, options.num_splits);
}

// out of a problem, and lse where it is wanted.
struct Results {
  Results(const Problem& problem, const Argument& q, bool wants_lse)
      : out(problem.out_sizes, problem.packed, q.dtype, q.device) {
    if (!wants_lse) return;
    const DecodeParams& params = problem.params;
    const int64_t sizes[3] = {params.batch, params.heads, params.lse_head_stride};
    lse = problem.packed ? empty(sizes + 1, 2, constants().fp32, q.device) : empty(sizes, 3, constants().fp32, q.device);
  }
  void put(StableIValue* stack) {
    Tensor result = out.take();
    stack[0] = box(result);
    if (lse) stack[1] = box(lse);
  }

  Output out;
  Tensor lse;
};

// Floats that attend() works in: the splits' results, and the log-sum-exp that nobody takes.
int64_t workspace_floats(const Problem& problem, const Results& results) {
  return problem.partial_floats() + (results.lse ? 0 : problem.params.lse_count);
}

// Launches; `partial` holds workspace_floats() floats.
void attend(Problem& problem, const void* q, const Strides& q_stride, float* partial, const Results& results, CUstream stream) {
  DecodeParams& params = problem.params;
  params.q = q;
  params.q_stride = q_stride;
  params.out = results.out.data();
  params.out_stride = results.out.strides();
  params.lse = results.lse ? static_cast<float*>(data_of(results.lse)) : partial + problem.partial_floats();
  if (params.splits > 1) {
    params.partial_out = partial;
    params.partial_lse = partial + params.splits * params.lse_count * params.head_dim_v;
  }
  launch_decode(*problem.kernel, params, stream);
}

// Memory of `count` floats, or none.
Tensor workspace(int64_t count, int32_t device) {
  const int64_t sizes[1] = {count};
  return count > 0 ? empty(sizes, 1, constants().fp32, device) : Tensor();
}

void run_decode(StableIValue* stack, bool output) {
  Arguments arguments(stack);
  const Tensor q_tensor = arguments.tensor();
  const Tensor k_tensor = arguments.tensor();
  const Tensor v_tensor = arguments.tensor();
  Options options;
  Tensor cu_seqlens_q;
  int64_t max_seqlen_q = 0;
  if (output) {
    options.read_usual(arguments);
  } else {
    options.read(arguments);
    cu_seqlens_q = arguments.optional_tensor();
    max_seqlen_q = arguments.integer();
  }

  const Rows q = read_rows("q", q_tensor, static_cast<bool>(cu_seqlens_q));
  const Cache k_cache("k_cache", k_tensor, q.argument, false);
  const Cache v_cache("v_cache", v_tensor, q.argument, false);
  Problem problem;
  read_problem(problem, q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, options, 0);
  Results results(problem, q.argument, !output);
  if (problem.kernel != nullptr) {
    const Input q_input(q);
    const Tensor memory = workspace(workspace_floats(problem, results), q.argument.device);
    float* const partial = memory ? static_cast<float*>(data_of(memory)) : nullptr;
    attend(problem, q_input.data(), q_input.strides(), partial, results, current_stream(q.argument.device));
  }
  results.put(stack);
}

}  // namespace

void decode(StableIValue* stack, uint64_t, uint64_t) { run_decode(stack, false); }
void decode_output(StableIValue* stack, uint64_t, uint64_t) { run_decode(stack, true); }

namespace {

// cos and sin: (positions, rotary_dim / 2), of the data's dtype or fp32, converted to fp32 otherwise.
struct RotaryTable {
  Tensor cos_copy, sin_copy;

  void read(const Tensor& cos_tensor, const Tensor& sin_tensor, const Argument& data, int64_t head_dim,
            RotaryParams* params) {
    const Argument cos = read_argument("cos", cos_tensor);
    const Argument sin = read_argument("sin", sin_tensor);
    check_rank(cos, 2);
    check_shape(sin, cos.sizes, 2);
    check_same(sin, cos);
    check_device(cos, data);
    const int64_t rotary_dim = 2 * cos.sizes[1];
    if (rotary_dim > head_dim) {
      fail("cos has shape %s, which rotates %lld columns; the head_dim is %lld.", ShapeText(cos).c_str(),
           static_cast<long long>(rotary_dim), static_cast<long long>(head_dim));
    }
    const int32_t dtype = cos.dtype == data.dtype ? data.dtype : constants().fp32;
    params->cos = contiguous_as(cos, dtype, &cos_copy);
    params->sin = contiguous_as(sin, dtype, &sin_copy);
    params->table_fp32 = dtype == constants().fp32 ? 1 : 0;
    params->positions = static_cast<int>(cos.sizes[0]);
    params->rotary_dim = static_cast<int>(rotary_dim);
  }
};

const Kernel& rotary_kernel(const Argument& data) {
  KernelQuery query = {};
  query.op = Op::rotary;
  query.dtype = kernel_dtype(data);
  query.mask = Mask::general;
  query.head_dim = kMaxHeadDim;
  query.device = data.device;
  return resolve(query);
}

void set_task(RotaryTask& task, const Rows& source, const Input& input) {
  task.source = input.data();
  task.source_stride = input.strides();
  task.heads = static_cast<int>(source.sizes[2]);
  task.head_dim = static_cast<int>(padded(source.sizes[3]));
}

}  // namespace

void rotary(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor source_tensor = arguments.tensor();
  const Tensor destination_tensor = arguments.tensor();
  const Tensor cos = arguments.tensor();
  const Tensor sin = arguments.tensor();
  const Tensor offsets = arguments.optional_tensor();
  const int64_t offset = arguments.integer();
  const Tensor cu_seqlens = arguments.optional_tensor();
  const int64_t max_seqlen = arguments.integer();
  const bool interleaved = arguments.boolean();
  const bool conjugate = arguments.boolean();

  const bool packed = static_cast<bool>(cu_seqlens);
  const Rows source = read_rows("source", source_tensor, packed);
  const Rows destination = read_rows("destination", destination_tensor, packed);
  check_same(destination.argument, source.argument);
  check_rows(destination, source.sizes);
  if (source.sizes[3] > kMaxHeadDim) {
    fail("source has head_dim %lld; 1 to %d are supported.", static_cast<long long>(source.sizes[3]), kMaxHeadDim);
  }
  if (offset <= -kMaxSeqlen || offset >= kMaxSeqlen) {
    fail("offset is %lld, which no position can be.", static_cast<long long>(offset));
  }
  if (max_seqlen < 0) fail("max_seqlen is %lld; it must not be negative.", static_cast<long long>(max_seqlen));
  RotaryParams params = {};
  RotaryTable table;
  table.read(cos, sin, source.argument, source.sizes[3], &params);
  int64_t batch = source.sizes[0];
  if (packed) {
    const Argument starts = read_argument("cu_seqlens", cu_seqlens);
    check_rank(starts, 1);
    if (starts.sizes[0] < 1) fail("cu_seqlens has shape (0), expected (batch + 1).");
    batch = starts.sizes[0] - 1;
    params.cu_seqlens = read_numbers("cu_seqlens", cu_seqlens, source.argument, batch + 1);
  }
  params.offsets = read_numbers("offsets", offsets, source.argument, batch);
  params.offset = static_cast<int>(offset);
  params.interleaved = interleaved ? 1 : 0;
  params.conjugate = conjugate ? 1 : 0;
  params.batch = static_cast<int>(batch);
  params.tasks = 1;
  const Input input(source);
  Output output(destination);
  set_task(params.task[0], source, input);
  params.task[0].destination = output.data();
  params.task[0].destination_stride = output.strides();
  params.task[0].seqlen = static_cast<int>(packed && max_seqlen < source.sizes[1] ? max_seqlen : source.sizes[1]);
  params.task[0].rotate = 1;
  launch_rotary(rotary_kernel(source.argument), params, current_stream(source.argument.device));
  output.finish();
}

namespace {

// New rows of k and v on their way into a cache, and with them a query that is rotated by the same tables.
class NewRows {
 public:
  // The rows' places are `offsets` (batch), or all `offset`, and up.
  NewRows(int64_t batch, const Tensor& k, const Tensor& v, const Cache& k_cache, const Cache& v_cache, const Tensor& offsets,
          int64_t offset, const Tensor& leftpad_k, const Tensor& cache_batch_idx, const Tensor& block_table)
      : k_(read_rows("k", k, false)), v_(read_rows("v", v, false)), k_cache_(k_cache), v_cache_(v_cache) {
    check_same(k_.argument, k_cache.rows.argument);
    check_same(v_.argument, k_.argument);
    const int64_t* const k_sizes = k_cache.rows.sizes;
    const int64_t* const v_sizes = v_cache.rows.sizes;
    const int64_t k_shape[4] = {batch, k_.sizes[1], k_sizes[2], k_sizes[3]};
    const int64_t v_shape[4] = {batch, k_.sizes[1], k_sizes[2], v_sizes[3]};
    const int64_t v_cache_shape[4] = {k_sizes[0], k_sizes[1], k_sizes[2], v_sizes[3]};
    check_rows(v_cache.rows, v_cache_shape);
    check_rows(k_, k_shape);
    check_rows(v_, v_shape);
    check_slabs(k_cache.rows, block_table, cache_batch_idx, batch);
    int64_t capacity = 0;
    params_.pages = read_pages(block_table, k_cache.rows, batch, &capacity);
    check_capacity(capacity);
    if (offset < 0 || offset > capacity) {
      fail("offset %lld is outside of a cache of %lld rows.", static_cast<long long>(offset),
           static_cast<long long>(capacity));
    }
    params_.capacity = static_cast<int>(capacity);
    params_.offsets = read_numbers("offsets", offsets, k_.argument, batch);
    params_.offset = static_cast<int>(offset);
    params_.leftpad = read_numbers("leftpad_k", leftpad_k, k_.argument, batch);
    params_.cache_batch_idx = read_numbers("cache_batch_idx", cache_batch_idx, k_.argument, batch);
    params_.slabs = static_cast<int>(k_sizes[0]);
    params_.batch = static_cast<int>(batch);
  }

  int64_t count() const { return k_.sizes[1]; }

  // Rotates k. `query_rows`: those of the query that add_query is going to be called with, 0 where all of them have the
  // position of the first new row. Every position must be in the tables, as far as the host knows positions.
  void rotate(const Tensor& cos, const Tensor& sin, bool interleaved, int64_t query_rows) {
    if (static_cast<bool>(cos) != static_cast<bool>(sin)) fail("cos and sin must be given together; one of them is None.");
    if (!cos) return;
    const Argument table = read_argument("cos", cos);
    if (table.dtype != k_.argument.dtype) check_dtype(table, constants().fp32);
    table_.read(cos, sin, k_.argument, k_.sizes[3], &params_);
    const int64_t rows = query_rows > count() ? query_rows : count();
    const int64_t needed = params_.offsets != nullptr ? params_.capacity : params_.offset + rows;
    if (params_.positions < needed) {
      fail("cos has %d positions; %lld are needed.", params_.positions, static_cast<long long>(needed));
    }
    params_.interleaved = interleaved ? 1 : 0;
    rotates_ = true;
  }
  bool rotates() const { return rotates_; }

  void launch(const Rows* q, const Input* q_input, void* q_out, const Strides& q_out_stride, bool same_position,
              CUstream stream) {
    const Input k_input(k_), v_input(v_);
    add(k_, k_input, k_cache_.data, k_cache_.strides, rotates_);
    params_.task[0].to_cache = 1;
    add(v_, v_input, v_cache_.data, v_cache_.strides, false);
    params_.task[1].to_cache = 1;
    if (q != nullptr) {
      add(*q, *q_input, q_out, q_out_stride, true);
      params_.task[2].same_position = same_position ? 1 : 0;
    }
    launch_rotary(rotary_kernel(k_.argument), params_, stream);
  }

 private:
  void add(const Rows& source, const Input& input, void* destination, const Strides& stride, bool rotate) {
    RotaryTask& task = params_.task[params_.tasks++];
    set_task(task, source, input);
    task.destination = destination;
    task.destination_stride = stride;
    task.seqlen = static_cast<int>(source.sizes[1]);
    task.rotate = rotate ? 1 : 0;
  }

  const Rows k_, v_;
  const Cache& k_cache_;
  const Cache& v_cache_;
  RotaryParams params_ = {};
  RotaryTable table_;
  bool rotates_ = false;
};

}  // namespace

void append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor k_cache_tensor = arguments.tensor();
  const Tensor v_cache_tensor = arguments.tensor();
  const Tensor offsets = arguments.optional_tensor();
  const int64_t offset = arguments.integer();
  const Tensor cache_batch_idx = arguments.optional_tensor();
  const Tensor block_table = arguments.optional_tensor();

  const Argument first = read_argument("k", k);
  const Cache k_cache("k_cache", k_cache_tensor, first, true);
  const Cache v_cache("v_cache", v_cache_tensor, first, true);
  check_rank(first, 4);
  NewRows rows(first.sizes[0], k, v, k_cache, v_cache, offsets, offset, Tensor(), cache_batch_idx, block_table);
  rows.launch(nullptr, nullptr, nullptr, Strides(), false, current_stream(first.device));
  k_cache.finish();
  v_cache.finish();
}

namespace {

void run_kvcache(StableIValue* stack, bool output) {
  Arguments arguments(stack);
  const Tensor q_tensor = arguments.tensor();
  const Tensor k_cache_tensor = arguments.tensor();
  const Tensor v_cache_tensor = arguments.tensor();
  const Tensor k = arguments.tensor();
  const Tensor v = arguments.tensor();
  const Tensor cos = arguments.optional_tensor();
  const Tensor sin = arguments.optional_tensor();
  const bool interleaved = arguments.boolean();
  Options options;
  if (output) {
    options.read_usual(arguments);
  } else {
    options.read(arguments);
  }

  // All is checked, and every kernel at hand, before anything is launched.
  const Rows q = read_rows("q", q_tensor, false);
  const Cache k_cache("k_cache", k_cache_tensor, q.argument, true);
  const Cache v_cache("v_cache", v_cache_tensor, q.argument, true);
  if (!options.seqlens_k && options.seqlen_k < 0) fail("k is given, but neither seqlens_k nor seqlen_k.");
  NewRows rows(q.sizes[0], k, v, k_cache, v_cache, options.seqlens_k, options.seqlens_k ? 0 : options.seqlen_k,
               options.leftpad_k, options.cache_batch_idx, options.block_table);
  const bool same_position = !options.causal && options.window_left < 0 && options.window_right < 0;
  rows.rotate(cos, sin, interleaved, same_position ? 1 : q.sizes[1]);
  Problem problem;
  read_problem(problem, q, k_cache, v_cache, Tensor(), 0, options, rows.count());
  Results results(problem, q.argument, !output);
  const Input q_input(q);
  // A rotated q, contiguous, and then the partial results.
  const int64_t q_row = q.sizes[2] * padded(q.sizes[3]);
  const int64_t q_floats = rows.rotates() ? q.sizes[0] * q.sizes[1] * q_row / 2 : 0;
  const Tensor memory = workspace(q_floats + workspace_floats(problem, results), q.argument.device);
  float* const floats = memory ? static_cast<float*>(data_of(memory)) : nullptr;
  const CUstream stream = current_stream(q.argument.device);
  const Strides rotated = {q.sizes[1] * q_row, q_row, padded(q.sizes[3])};
  rows.launch(rows.rotates() ? &q : nullptr, &q_input, floats, rotated, same_position, stream);
  if (problem.kernel != nullptr) {
    const void* const q_data = rows.rotates() ? floats : q_input.data();
    attend(problem, q_data, rows.rotates() ? rotated : q_input.strides(), floats + q_floats, results, stream);
  }
  k_cache.finish();
  v_cache.finish();
  results.put(stack);
}

}  // namespace

void kvcache(StableIValue* stack, uint64_t, uint64_t) { run_kvcache(stack, false); }
void kvcache_output(StableIValue* stack, uint64_t, uint64_t) { run_kvcache(stack, true); }

}  // namespace flash_attn
