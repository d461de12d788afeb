// The operators of KV caches and of rotary embeddings for CUDA tensors.
//
//   decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? seqused_k, Tensor? leftpad_k, Tensor? cache_batch_idx,
//       Tensor? block_table, Tensor? alibi_slopes, Tensor? sink, float softmax_scale, bool causal, int window_left,
//       int window_right, int attention_chunk, float softcap, int num_splits) -> (Tensor out, Tensor lse)
//   rotary(Tensor source, Tensor(a!) destination, Tensor cos, Tensor sin, Tensor? offsets, int offset,
//       Tensor? cu_seqlens, int max_seqlen, bool interleaved, bool conjugate) -> ()
//   append(Tensor? q, Tensor(a!)? q_out, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor? cos,
//       Tensor? sin, Tensor? offsets, int offset, Tensor? leftpad_k, Tensor? cache_batch_idx, Tensor? block_table,
//       bool interleaved, bool same_position) -> ()
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
  if (table.sizes[1] > 1 && table.strides[1] != 1) fail("block_table must have a contiguous last dimension.");
  pages.block_table = static_cast<const int*>(table.data);
  pages.table_batch_stride = table.strides[0];
  pages.page_size = static_cast<int>(cache.sizes[1]);
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

}  // namespace

void decode(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q_tensor = arguments.tensor();
  const Tensor k_tensor = arguments.tensor();
  const Tensor v_tensor = arguments.tensor();
  const Tensor seqused_k = arguments.optional_tensor();
  const Tensor leftpad_k = arguments.optional_tensor();
  const Tensor cache_batch_idx = arguments.optional_tensor();
  const Tensor block_table = arguments.optional_tensor();
  const Tensor alibi_slopes = arguments.optional_tensor();
  const Tensor sink = arguments.optional_tensor();
  const double softmax_scale = arguments.real();
  const bool causal = arguments.boolean();
  const int64_t window_left = arguments.integer();
  const int64_t window_right = arguments.integer();
  const int64_t chunk = arguments.integer();
  const double softcap = arguments.real();
  const int64_t num_splits = arguments.integer();

  const Rows q = read_rows("q", q_tensor, false);
  const Cache k_cache("k_cache", k_tensor, q.argument, false);
  const Cache v_cache("v_cache", v_tensor, q.argument, false);
  const Rows& k = k_cache.rows;
  const Rows& v = v_cache.rows;
  const int64_t batch = q.sizes[0], heads = q.sizes[2], heads_kv = k.sizes[2];
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
  check_slabs(k, block_table, cache_batch_idx, batch);

  const int64_t out_sizes[4] = {batch, q.sizes[1], heads, v.sizes[3]};
  const int64_t lse_sizes[3] = {batch, heads, q.sizes[1]};
  Output out(out_sizes, false, q.argument.dtype, q.argument.device);
  Tensor lse = empty(lse_sizes, 3, constants().fp32, q.argument.device);
  const int64_t rows = batch * heads * q.sizes[1];
  if (rows > 0) {
    DecodeParams params = {};
    int64_t capacity = 0;
    params.pages = read_pages(block_table, k, batch, &capacity);
    check_capacity(capacity);
    check_capacity(q.sizes[1] * heads / heads_kv);
    const Input q_input(q);
    Tensor alibi_copy, sink_copy;
    read_alibi_slopes(alibi_slopes, q.argument, batch, heads, &params.modifiers, &alibi_copy);
    read_sink(sink, q.argument, heads, &params.modifiers, &sink_copy);
    params.modifiers.window_left = clamp_window(window_left);
    params.modifiers.window_right = causal ? 0 : clamp_window(window_right);
    params.modifiers.chunk = static_cast<int>(chunk > 0 && chunk < kMaxSeqlen ? chunk : 0);
    params.modifiers.softcap = static_cast<float>(softcap);
    params.sequences.seqused_k = read_numbers("seqused_k", seqused_k, q.argument, batch);
    params.sequences.leftpad_k = read_numbers("leftpad_k", leftpad_k, q.argument, batch);
    params.cache_batch_idx = read_numbers("cache_batch_idx", cache_batch_idx, q.argument, batch);
    params.slabs = static_cast<int>(k.sizes[0]);
    params.q = q_input.data();
    params.k = k_cache.data;
    params.v = v_cache.data;
    params.out = out.data();
    params.lse = static_cast<float*>(data_of(lse));
    params.q_stride = q_input.strides();
    params.k_stride = k_cache.strides;
    params.v_stride = v_cache.strides;
    params.out_stride = out.strides();
    params.batch = static_cast<int>(batch);
    params.heads = static_cast<int>(heads);
    params.heads_kv = static_cast<int>(heads_kv);
    params.seqlen_q = static_cast<int>(q.sizes[1]);
    params.seqlen_k = static_cast<int>(capacity);
    params.head_dim = static_cast<int>(padded(q.sizes[3]));
    params.head_dim_v = static_cast<int>(padded(v.sizes[3]));
    params.scale = static_cast<float>(softmax_scale);

    KernelQuery query = {};
    query.op = Op::decode;
    query.dtype = kernel_dtype(q.argument);
    query.mask = Mask::general;
    query.head_dim = params.head_dim > params.head_dim_v ? params.head_dim : params.head_dim_v;
    query.device = q.argument.device;
    const Kernel& kernel = resolve(query);
    params.splits = decode_splits(kernel, params, num_splits);
    Tensor partial;
    if (params.splits > 1) {
      const int64_t count[1] = {params.splits * rows * (params.head_dim_v + 1)};
      partial = empty(count, 1, constants().fp32, q.argument.device);
      params.partial_out = static_cast<float*>(data_of(partial));
      params.partial_lse = params.partial_out + params.splits * rows * params.head_dim_v;
    }
    launch_decode(kernel, params, current_stream(q.argument.device));
  }
  Tensor result = out.take();
  stack[0] = box(result);
  stack[1] = box(lse);
}

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

void append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor q_tensor = arguments.optional_tensor();
  const Tensor q_out_tensor = arguments.optional_tensor();
  const Tensor k_tensor = arguments.tensor();
  const Tensor v_tensor = arguments.tensor();
  const Tensor k_cache_tensor = arguments.tensor();
  const Tensor v_cache_tensor = arguments.tensor();
  const Tensor cos = arguments.optional_tensor();
  const Tensor sin = arguments.optional_tensor();
  const Tensor offsets = arguments.optional_tensor();
  const int64_t offset = arguments.integer();
  const Tensor leftpad_k = arguments.optional_tensor();
  const Tensor cache_batch_idx = arguments.optional_tensor();
  const Tensor block_table = arguments.optional_tensor();
  const bool interleaved = arguments.boolean();
  const bool same_position = arguments.boolean();

  const Rows k = read_rows("k", k_tensor, false);
  const Rows v = read_rows("v", v_tensor, false);
  check_same(v.argument, k.argument);
  const Cache k_slabs("k_cache", k_cache_tensor, k.argument, true);
  const Cache v_slabs("v_cache", v_cache_tensor, k.argument, true);
  const Rows& k_cache = k_slabs.rows;
  const Rows& v_cache = v_slabs.rows;
  const int64_t batch = k.sizes[0];
  const int64_t v_shape[4] = {batch, k.sizes[1], k.sizes[2], v_cache.sizes[3]};
  const int64_t k_cache_shape[4] = {k_cache.sizes[0], k_cache.sizes[1], k.sizes[2], k.sizes[3]};
  const int64_t v_cache_shape[4] = {k_cache.sizes[0], k_cache.sizes[1], k.sizes[2], v_cache.sizes[3]};
  check_rows(v, v_shape);
  check_rows(k_cache, k_cache_shape);
  check_rows(v_cache, v_cache_shape);
  check_slabs(k_cache, block_table, cache_batch_idx, batch);

  RotaryParams params = {};
  RotaryTable table;
  const bool rotates = static_cast<bool>(cos);
  if (rotates != static_cast<bool>(sin)) fail("cos and sin must be given together; one of them is None.");
  if (rotates) table.read(cos, sin, k.argument, k.sizes[3], &params);
  int64_t capacity = 0;
  params.pages = read_pages(block_table, k_cache, batch, &capacity);
  check_capacity(capacity);
  if (offset < 0 || offset > capacity) {
    fail("offset %lld is outside of a cache of %lld rows.", static_cast<long long>(offset),
         static_cast<long long>(capacity));
  }
  params.capacity = static_cast<int>(capacity);
  params.offsets = read_numbers("offsets", offsets, k.argument, batch);
  params.offset = static_cast<int>(offset);
  params.leftpad = read_numbers("leftpad_k", leftpad_k, k.argument, batch);
  params.cache_batch_idx = read_numbers("cache_batch_idx", cache_batch_idx, k.argument, batch);
  params.slabs = static_cast<int>(k_cache.sizes[0]);
  params.interleaved = interleaved ? 1 : 0;
  params.batch = static_cast<int>(batch);

  const Input k_input(k), v_input(v);
  const Rows* const sources[2] = {&k, &v};
  const Input* const inputs[2] = {&k_input, &v_input};
  const Cache* const caches[2] = {&k_slabs, &v_slabs};
  for (int i = 0; i < 2; ++i) {
    RotaryTask& task = params.task[i];
    set_task(task, *sources[i], *inputs[i]);
    task.destination = caches[i]->data;
    task.destination_stride = caches[i]->strides;
    task.seqlen = static_cast<int>(sources[i]->sizes[1]);
    task.rotate = rotates && i == 0 ? 1 : 0;
    task.to_cache = 1;
  }
  params.tasks = 2;

  if (!q_tensor) {
    launch_rotary(rotary_kernel(k.argument), params, current_stream(k.argument.device));
    k_slabs.finish();
    v_slabs.finish();
    return;
  }
  if (!q_out_tensor) fail("q is given, but q_out is None.");
  const Rows q = read_rows("q", q_tensor, false);
  const Rows q_out = read_rows("q_out", q_out_tensor, false);
  check_same(q.argument, k.argument);
  check_same(q_out.argument, k.argument);
  check_rows(q_out, q.sizes);
  const int64_t q_shape[4] = {batch, q.sizes[1], q.sizes[2], k.sizes[3]};
  check_rows(q, q_shape);
  const Input q_input(q);
  Output q_output(q_out);
  RotaryTask& task = params.task[2];
  set_task(task, q, q_input);
  task.destination = q_output.data();
  task.destination_stride = q_output.strides();
  task.seqlen = static_cast<int>(q.sizes[1]);
  task.rotate = rotates ? 1 : 0;
  task.same_position = same_position ? 1 : 0;
  params.tasks = 3;
  launch_rotary(rotary_kernel(k.argument), params, current_stream(k.argument.device));
  k_slabs.finish();
  v_slabs.finish();
  q_output.finish();
}

}  // namespace flash_attn
