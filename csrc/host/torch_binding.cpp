// The operators flash_attn::fwd and flash_attn::bwd for CUDA tensors: the only file that knows torch.
//
// The schemas are defined in Python; loading the library (torch.ops.load_library) registers these implementations:
//   fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor out, Tensor lse)
//   bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, bool causal,
//       bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)
// q, out, dout, dq are (B, Sq, H, D), k, v, dk, dv (B, Sk, Hk, D), all of one dtype, fp16 or bf16; lse is fp32 (B, H, Sq).
// Inputs may have any strides; outputs are contiguous.
//
// Built by g++ alone, without torch and without CUDA; buildtools/host.py holds the commands. The link is against an
// empty library named libtorch.so, so that the loader resolves torch's functions from the torch that is running.
#include <cstdint>
#include <cstring>

#include "host/dispatch.h"
#include "host/error.h"
#include "host/torch_shim.h"

namespace flash_attn {

namespace {

// Torch says whether a call worked; why is in its log, and since 2.13 also here.
void check_torch(AOTITorchError error, const char* what) {
  if (__builtin_expect(error == 0, 1)) return;
  const bool has_reason = torch_exception_get_what_without_backtrace != nullptr;
  const char* const reason = has_reason ? torch_exception_get_what_without_backtrace() : nullptr;
  fail("torch could not %s%s%s", what, reason != nullptr ? ": " : "; its log says why.", reason != nullptr ? reason : "");
}

// An owned tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(other.release()) {}
  Tensor& operator=(Tensor&& other) noexcept {
    if (this != &other) {
      reset();
      handle_ = other.release();
    }
    return *this;
  }
  ~Tensor() { reset(); }

  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() {
    const AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return handle;
  }

 private:
  void reset() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
    handle_ = nullptr;
  }

  AtenTensorHandle handle_ = nullptr;
};

// Unboxing: a stack slot holds the value's bytes, the lowest first.
template <typename T>
T unbox(StableIValue slot) {
  T value;
  memcpy(&value, &slot, sizeof(value));
  return value;
}

Tensor take_tensor(StableIValue slot) { return Tensor(unbox<AtenTensorHandle>(slot)); }

StableIValue box(Tensor& tensor) {
  const AtenTensorHandle handle = tensor.release();
  StableIValue slot = 0;
  memcpy(&slot, &handle, sizeof(handle));
  return slot;
}

// torch's numbers for what is used here, asked for once.
struct Constants {
  int32_t cuda = aoti_torch_device_type_cuda();
  int32_t fp16 = aoti_torch_dtype_float16();
  int32_t bf16 = aoti_torch_dtype_bfloat16();
  int32_t fp32 = aoti_torch_dtype_float32();
};
const Constants& constants() {
  static const Constants values;
  return values;
}

// What the launch needs to know of a tensor argument.
struct Argument {
  const char* name;
  AtenTensorHandle handle;
  const void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype;
  int32_t device;
};

Argument read_argument(const char* name, const Tensor& tensor, int64_t rank) {
  Argument argument;
  argument.name = name;
  argument.handle = tensor.get();
  if (argument.handle == nullptr) fail("%s is no tensor.", name);
  int64_t dim = 0;
  int32_t device_type = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  AOTITorchError error = aoti_torch_get_dim(argument.handle, &dim);
  error |= aoti_torch_get_device_type(argument.handle, &device_type);
  error |= aoti_torch_get_device_index(argument.handle, &argument.device);
  error |= aoti_torch_get_dtype(argument.handle, &argument.dtype);
  error |= aoti_torch_get_sizes(argument.handle, &sizes);
  error |= aoti_torch_get_strides(argument.handle, &strides);
  error |= torch_get_const_data_ptr(argument.handle, &argument.data);
  check_torch(error, "describe a tensor");
  argument.sizes = sizes;
  argument.strides = strides;
  if (dim != rank) {
    fail("%s has %lld dimensions, not %lld.", name, static_cast<long long>(dim), static_cast<long long>(rank));
  }
  if (device_type != constants().cuda) fail("%s is not on a CUDA device.", name);
  return argument;
}

void check_same(const Argument& argument, const Argument& first) {
  if (argument.dtype != first.dtype) {
    fail("%s and %s have different dtypes.", argument.name, first.name);
  }
  if (argument.device != first.device) {
    fail("%s is on cuda:%d, %s on cuda:%d; all tensors must be on one device.", argument.name, argument.device,
         first.name, first.device);
  }
}

void check_sizes(const Argument& argument, const int64_t (&expected)[4]) {
  const int64_t* const found = argument.sizes;
  if (memcmp(found, expected, sizeof(expected)) == 0) return;
  fail("%s has shape (%lld, %lld, %lld, %lld), expected (%lld, %lld, %lld, %lld).", argument.name,
       static_cast<long long>(found[0]), static_cast<long long>(found[1]), static_cast<long long>(found[2]),
       static_cast<long long>(found[3]), static_cast<long long>(expected[0]), static_cast<long long>(expected[1]),
       static_cast<long long>(expected[2]), static_cast<long long>(expected[3]));
}

// The problem that q, k and v pose, checked: what would make a kernel read or write out of place does not pass.
struct Problem {
  int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim;
  int64_t padded_head_dim;  // rows must start on 16 bytes, 8 elements
  int32_t dtype;
  int32_t device;

  int64_t query_shape(int i) const { return i == 0 ? batch : i == 1 ? seqlen_q : i == 2 ? heads : head_dim; }
};

Problem read_problem(const Argument& q, const Argument& k, const Argument& v) {
  check_same(k, q);
  check_same(v, q);
  if (q.dtype != constants().fp16 && q.dtype != constants().bf16) fail("q is neither float16 nor bfloat16.");
  Problem p;
  p.dtype = q.dtype;
  p.device = q.device;
  p.batch = q.sizes[0];
  p.seqlen_q = q.sizes[1];
  p.heads = q.sizes[2];
  p.head_dim = q.sizes[3];
  p.seqlen_k = k.sizes[1];
  p.heads_kv = k.sizes[2];
  p.padded_head_dim = (p.head_dim + kHeadDimStep - 1) / kHeadDimStep * kHeadDimStep;
  const int64_t key_shape[4] = {p.batch, p.seqlen_k, p.heads_kv, p.head_dim};
  check_sizes(k, key_shape);
  check_sizes(v, key_shape);
  if (p.head_dim < 1 || p.head_dim > kMaxHeadDim) {
    fail("q has head_dim %lld; 1 to %d are supported.", static_cast<long long>(p.head_dim), kMaxHeadDim);
  }
  if (p.heads_kv == 0 ? p.heads != 0 : p.heads % p.heads_kv != 0) {
    fail("q has %lld heads, which is not a multiple of the %lld heads of k and v.", static_cast<long long>(p.heads),
         static_cast<long long>(p.heads_kv));
  }
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen || p.batch > INT32_MAX || p.heads > INT32_MAX) {
    fail("batch %lld, sequence lengths %lld and %lld, or heads %lld are beyond what a kernel can count.",
         static_cast<long long>(p.batch), static_cast<long long>(p.seqlen_q), static_cast<long long>(p.seqlen_k),
         static_cast<long long>(p.heads));
  }
  return p;
}

CUstream current_stream(int32_t device) {
  if (aoti_torch_get_current_cuda_stream == nullptr) {
    fail("this torch was built without CUDA, but a tensor says that it is on a CUDA device.");
  }
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(device, &stream), "name the current CUDA stream");
  return static_cast<CUstream>(stream);
}

Tensor empty(const int64_t* sizes, int64_t rank, int32_t dtype, int32_t device) {
  int64_t strides[4];
  int64_t stride = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(rank, sizes, strides, dtype, constants().cuda, device, &handle),
              "allocate GPU memory");
  return Tensor(handle);
}

void* data_of(const Tensor& tensor) {
  void* data = nullptr;
  check_torch(torch_get_mutable_data_ptr(tensor.get(), &data), "give a tensor's memory");
  return data;
}

// Columns [first, first + count) of a contiguous tensor of `sizes`, as a view.
Tensor columns(const Tensor& tensor, const int64_t (&sizes)[4], int64_t first, int64_t count) {
  const int64_t view_sizes[4] = {sizes[0], sizes[1], sizes[2], count};
  const int64_t strides[4] = {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
  AtenTensorHandle view = nullptr;
  check_torch(aoti_torch__reinterpret_tensor(tensor.get(), 4, view_sizes, strides, first, &view), "make a view");
  return Tensor(view);
}

bool is_empty(const Argument& argument) {
  return argument.sizes[0] == 0 || argument.sizes[1] == 0 || argument.sizes[2] == 0 || argument.sizes[3] == 0;
}

// Whether the kernels can read the tensor as it is: last dimension contiguous, every row on 16 bytes.
bool readable_as_is(const Argument& argument, const Problem& problem) {
  if (is_empty(argument)) return true;
  if (problem.padded_head_dim != problem.head_dim || argument.strides[3] != 1) return false;
  if (reinterpret_cast<uintptr_t>(argument.data) % 16 != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (argument.sizes[i] > 1 && argument.strides[i] % kHeadDimStep != 0) return false;
  }
  return true;
}

// An input as the kernels read it: the tensor itself, or a copy with contiguous, aligned and zero-padded rows.
class Input {
 public:
  Input(const Argument& argument, const Problem& problem) {
    if (__builtin_expect(readable_as_is(argument, problem), 1)) {
      data_ = argument.data;
      strides_ = Strides{stride_of(argument, 0), stride_of(argument, 1), stride_of(argument, 2)};
      return;
    }
    copy(argument, problem);
  }
  const void* data() const { return data_; }
  Strides strides() const { return strides_; }

 private:
  // A dimension of size 1 may have any stride in torch, aligned or not.
  static int64_t stride_of(const Argument& argument, int i) { return argument.sizes[i] > 1 ? argument.strides[i] : 0; }

  __attribute__((noinline, cold)) void copy(const Argument& argument, const Problem& problem) {
    const int64_t columns_used = problem.head_dim, columns_all = problem.padded_head_dim;
    const int64_t sizes[4] = {argument.sizes[0], argument.sizes[1], argument.sizes[2], columns_all};
    copy_ = empty(sizes, 4, argument.dtype, argument.device);
    const Tensor used = columns(copy_, sizes, 0, columns_used);
    check_torch(aoti_torch_copy_(used.get(), argument.handle, 1), "copy a tensor");
    if (columns_all != columns_used) {
      const Tensor padding = columns(copy_, sizes, columns_used, columns_all - columns_used);
      check_torch(aoti_torch_zero_(padding.get()), "clear a tensor");
    }
    data_ = data_of(copy_);
    strides_ = Strides{sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3]};
  }

  const void* data_ = nullptr;
  Strides strides_ = {0, 0, 0};
  Tensor copy_;
};

// An output that the kernels write with padded rows and the caller gets contiguous, without the padding.
class Output {
 public:
  Output(int64_t batch, int64_t rows, int64_t heads, const Problem& problem)
      : sizes_{batch, rows, heads, problem.padded_head_dim},
        head_dim_(problem.head_dim),
        dtype_(problem.dtype),
        device_(problem.device),
        tensor_(empty(sizes_, 4, problem.dtype, problem.device)) {}

  void* data() const { return data_of(tensor_); }
  Strides strides() const { return Strides{sizes_[1] * sizes_[2] * sizes_[3], sizes_[2] * sizes_[3], sizes_[3]}; }

  // Called after the launch.
  Tensor take() {
    if (__builtin_expect(head_dim_ == sizes_[3], 1)) return static_cast<Tensor&&>(tensor_);
    const int64_t sizes[4] = {sizes_[0], sizes_[1], sizes_[2], head_dim_};
    Tensor result = empty(sizes, 4, dtype_, device_);
    const Tensor used = columns(tensor_, sizes_, 0, head_dim_);
    check_torch(aoti_torch_copy_(result.get(), used.get(), 1), "copy a tensor");
    return result;
  }

 private:
  int64_t sizes_[4];
  int64_t head_dim_;
  int32_t dtype_;
  int32_t device_;
  Tensor tensor_;
};

KernelQuery query_of(Op op, const Problem& problem, bool causal) {
  KernelQuery query;
  query.op = op;
  query.dtype = problem.dtype == constants().bf16 ? Dtype::bf16 : Dtype::fp16;
  query.mask = causal ? Mask::causal : Mask::full;
  query.head_dim = static_cast<int>(problem.padded_head_dim);
  query.device = problem.device;
  return query;
}

template <typename Params>
void set_problem(Params& params, const Problem& problem, double softmax_scale) {
  params.batch = static_cast<int>(problem.batch);
  params.heads = static_cast<int>(problem.heads);
  params.heads_kv = static_cast<int>(problem.heads_kv);
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.seqlen_k = static_cast<int>(problem.seqlen_k);
  params.head_dim = static_cast<int>(problem.padded_head_dim);
  params.scale = static_cast<float>(softmax_scale);
}

// The stack's inputs are ours to free: every handle is taken before anything can throw. torch reads the outputs from
// the same slots.
void fwd(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor q_tensor = take_tensor(stack[0]);
  const Tensor k_tensor = take_tensor(stack[1]);
  const Tensor v_tensor = take_tensor(stack[2]);
  const double softmax_scale = unbox<double>(stack[3]);
  const bool causal = unbox<bool>(stack[4]);

  const Argument q = read_argument("q", q_tensor, 4);
  const Argument k = read_argument("k", k_tensor, 4);
  const Argument v = read_argument("v", v_tensor, 4);
  const Problem problem = read_problem(q, k, v);

  const int64_t lse_sizes[3] = {problem.batch, problem.heads, problem.seqlen_q};
  Output out(problem.batch, problem.seqlen_q, problem.heads, problem);
  Tensor lse = empty(lse_sizes, 3, constants().fp32, problem.device);

  if (problem.batch > 0 && problem.seqlen_q > 0 && problem.heads > 0) {
    const Kernel& kernel = resolve(query_of(Op::fwd, problem, causal));
    const Input q_input(q, problem), k_input(k, problem), v_input(v, problem);
    FwdParams params;
    set_problem(params, problem, softmax_scale);
    params.q = q_input.data();
    params.k = k_input.data();
    params.v = v_input.data();
    params.out = out.data();
    params.lse = static_cast<float*>(data_of(lse));
    params.q_stride = q_input.strides();
    params.k_stride = k_input.strides();
    params.v_stride = v_input.strides();
    params.out_stride = out.strides();
    launch_fwd(kernel, params, current_stream(problem.device));
  }
  Tensor result = out.take();
  stack[0] = box(result);
  stack[1] = box(lse);
}

// lse as the kernels read it: contiguous fp32.
Tensor contiguous_lse(const Argument& lse, const Problem& problem) {
  const int64_t sizes[3] = {problem.batch, problem.heads, problem.seqlen_q};
  Tensor copy = empty(sizes, 3, constants().fp32, problem.device);
  check_torch(aoti_torch_copy_(copy.get(), lse.handle, 1), "copy a tensor");
  return copy;
}

bool is_contiguous_lse(const Argument& lse) {
  int64_t expected = 1;
  for (int i = 2; i >= 0; --i) {
    if (lse.sizes[i] > 1 && lse.strides[i] != expected) return false;
    expected *= lse.sizes[i];
  }
  return true;
}

void check_lse(const Argument& lse, const Argument& q, const Problem& problem) {
  if (lse.dtype != constants().fp32) fail("lse is not float32.");
  if (lse.device != q.device) fail("lse is on cuda:%d, q on cuda:%d.", lse.device, q.device);
  if (lse.sizes[0] != problem.batch || lse.sizes[1] != problem.heads || lse.sizes[2] != problem.seqlen_q) {
    fail("lse has shape (%lld, %lld, %lld), expected (%lld, %lld, %lld).", static_cast<long long>(lse.sizes[0]),
         static_cast<long long>(lse.sizes[1]), static_cast<long long>(lse.sizes[2]),
         static_cast<long long>(problem.batch), static_cast<long long>(problem.heads),
         static_cast<long long>(problem.seqlen_q));
  }
}

void bwd(StableIValue* stack, uint64_t, uint64_t) {
  const Tensor dout_tensor = take_tensor(stack[0]);
  const Tensor q_tensor = take_tensor(stack[1]);
  const Tensor k_tensor = take_tensor(stack[2]);
  const Tensor v_tensor = take_tensor(stack[3]);
  const Tensor out_tensor = take_tensor(stack[4]);
  const Tensor lse_tensor = take_tensor(stack[5]);
  const double softmax_scale = unbox<double>(stack[6]);
  const bool causal = unbox<bool>(stack[7]);
  const bool deterministic = unbox<bool>(stack[8]);

  const Argument q = read_argument("q", q_tensor, 4);
  const Argument k = read_argument("k", k_tensor, 4);
  const Argument v = read_argument("v", v_tensor, 4);
  const Argument dout = read_argument("dout", dout_tensor, 4);
  const Argument out = read_argument("out", out_tensor, 4);
  const Argument lse = read_argument("lse", lse_tensor, 3);
  const Problem problem = read_problem(q, k, v);
  const int64_t query_shape[4] = {problem.batch, problem.seqlen_q, problem.heads, problem.head_dim};
  check_same(dout, q);
  check_same(out, q);
  check_sizes(dout, query_shape);
  check_sizes(out, query_shape);
  check_lse(lse, q, problem);

  Output dq(problem.batch, problem.seqlen_q, problem.heads, problem);
  Output dk(problem.batch, problem.seqlen_k, problem.heads_kv, problem);
  Output dv(problem.batch, problem.seqlen_k, problem.heads_kv, problem);

  // Without queries the keys' gradients are still to be cleared, and the other way round: the kernels do both.
  const int64_t rows = problem.seqlen_q * problem.heads + problem.seqlen_k * problem.heads_kv;
  if (problem.batch > 0 && rows > 0) {
    const Kernel& kernel = resolve(query_of(Op::bwd, problem, causal));
    const Input dout_input(dout, problem), q_input(q, problem), k_input(k, problem), v_input(v, problem),
        out_input(out, problem);
    Tensor lse_copy;
    BwdParams params;
    set_problem(params, problem, softmax_scale);
    params.lse = static_cast<const float*>(lse.data);
    if (!is_contiguous_lse(lse)) {
      lse_copy = contiguous_lse(lse, problem);
      params.lse = static_cast<const float*>(data_of(lse_copy));
    }
    params.dout = dout_input.data();
    params.q = q_input.data();
    params.k = k_input.data();
    params.v = v_input.data();
    params.out = out_input.data();
    params.dq = dq.data();
    params.dk = dk.data();
    params.dv = dv.data();
    params.dout_stride = dout_input.strides();
    params.q_stride = q_input.strides();
    params.k_stride = k_input.strides();
    params.v_stride = v_input.strides();
    params.out_stride = out_input.strides();
    params.dq_stride = dq.strides();
    params.dk_stride = dk.strides();
    params.dv_stride = dv.strides();
    params.deterministic = deterministic ? 1 : 0;
    // Freed right after the launch: the allocator hands memory on in stream order.
    const int64_t buffer_size[1] = {bwd_workspace(kernel, params).total};
    const Tensor buffer = empty(buffer_size, 1, constants().fp32, problem.device);
    launch_bwd(kernel, params, static_cast<float*>(data_of(buffer)), current_stream(problem.device));
  }
  Tensor dq_result = dq.take(), dk_result = dk.take(), dv_result = dv.take();
  stack[0] = box(dq_result);
  stack[1] = box(dk_result);
  stack[2] = box(dv_result);
}

// Registers the operators while the library is loaded, and takes them back before it goes. Where torch refuses (it logs
// why), calls find no CUDA implementation: an exception would end the process here, inside the loader.
class Registration {
 public:
  Registration() {
    if (aoti_torch_library_init_impl("flash_attn", "CUDA", "flash_attn/torch_binding.cpp", 0, &library_) != 0) return;
    torch_library_impl(library_, "fwd", &fwd, kTorchTargetVersion);
    torch_library_impl(library_, "bwd", &bwd, kTorchTargetVersion);
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
