// Tensors of torch as the operators use them: owned handles, the stack of a call, what a kernel must know of an argument,
// copies of arguments that a kernel cannot read as they are, and outputs.
//
// Written against the C functions of torch_shim.h alone. Every failure is an exception with a complete sentence.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/driver.h"
#include "host/torch_shim.h"
#include "params.h"

namespace flash_attn {

// The kernels move rows in pieces of 16 bytes: head dims are multiples of so many elements, FP8 or of 16 bits.
constexpr int64_t kRowStep = 8;
constexpr int64_t kRowStepFp8 = 16;

inline int64_t padded(int64_t head_dim, int64_t step = kRowStep) { return (head_dim + step - 1) / step * step; }

// Torch says whether a call worked; why is in its log, and since 2.13 also in the message.
[[noreturn]] void fail_torch(const char* what);
inline void check_torch(AOTITorchError error, const char* what) {
  if (__builtin_expect(error != 0, 0)) fail_torch(what);
}

// An owned tensor, or none.
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

  explicit operator bool() const { return handle_ != nullptr; }
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

// Reads a call's arguments from the stack, in order. They are the operator's to free, so all are read before anything can
// throw. A slot holds the value's bytes, the lowest first.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return Tensor(read<AtenTensorHandle>(next_++)); }
  Tensor optional_tensor() {
    StableIValue* const inner = read<StableIValue*>(next_++);
    if (inner == nullptr) return Tensor();
    Tensor tensor(read<AtenTensorHandle>(inner));
    delete inner;
    return tensor;
  }
  double real() { return read<double>(next_++); }
  // Leaves `value` alone where there is none.
  void optional_real(double* value) {
    StableIValue* const inner = read<StableIValue*>(next_++);
    if (inner == nullptr) return;
    *value = read<double>(inner);
    delete inner;
  }
  int64_t integer() { return read<int64_t>(next_++); }
  bool boolean() { return read<bool>(next_++); }

 private:
  template <typename T>
  static T read(const StableIValue* slot) {
    T value;
    memcpy(&value, slot, sizeof(value));
    return value;
  }

  const StableIValue* next_;
};

// Hands a tensor over as a result.
inline StableIValue box(Tensor& tensor) {
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
  int32_t e4m3 = aoti_torch_dtype_float8_e4m3fn();
  int32_t int32 = aoti_torch_dtype_int32();
  int32_t int64 = aoti_torch_dtype_int64();
};
const Constants& constants();

inline int64_t row_step(int32_t dtype) { return dtype == constants().e4m3 ? kRowStepFp8 : kRowStep; }

// "float16"; for messages.
const char* dtype_name(int32_t dtype);

// A tensor argument. Sizes and strides are borrowed from the tensor.
struct Argument {
  const char* name;
  AtenTensorHandle handle;
  const void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t rank;
  int32_t dtype;
  int32_t device;
};

// Throws unless the tensor is on a CUDA device.
Argument read_argument(const char* name, const Tensor& tensor);

// "(2, 3)"; for messages.
class ShapeText {
 public:
  ShapeText(const int64_t* sizes, int64_t rank);
  explicit ShapeText(const Argument& argument) : ShapeText(argument.sizes, argument.rank) {}
  const char* c_str() const { return text_; }

 private:
  char text_[128];
};

// Each throws, naming the argument and both values, where the argument is not as asked for.
void check_rank(const Argument& argument, int64_t rank);
void check_shape(const Argument& argument, const int64_t* expected, int64_t rank);
void check_dtype(const Argument& argument, int32_t dtype);
void check_device(const Argument& argument, const Argument& first);
void check_same(const Argument& argument, const Argument& first);  // dtype and device
void check_contiguous(const Argument& argument);

bool is_contiguous(const Argument& argument);

// A (batch, rows, heads, head dim) argument, or one of packed sequences, (tokens, heads, head dim), as a batch of 1.
struct Rows {
  Argument argument;
  int64_t sizes[4];
  int64_t strides[4];

  bool packed() const { return argument.rank == 3; }
  bool empty() const { return sizes[0] == 0 || sizes[1] == 0 || sizes[2] == 0 || sizes[3] == 0; }
};

// Throws unless the argument has 4 dimensions, or 3 if it should be packed.
Rows read_rows(const char* name, const Tensor& tensor, bool packed);

// Throws unless `rows` has exactly these sizes; the first is left out of the message of packed ones.
void check_rows(const Rows& rows, const int64_t (&expected)[4]);

// The scale of scores where none is given. In float32 it is what Python's head_dim ** -0.5 is, for every head dim of a kernel.
inline double usual_scale(const Rows& q) { return 1 / __builtin_sqrt(static_cast<double>(q.sizes[3])); }

CUstream current_stream(int32_t device);

// A contiguous tensor with uninitialised memory.
Tensor empty(const int64_t* sizes, int64_t rank, int32_t dtype, int32_t device);

inline void* data_of(const Tensor& tensor) {
  void* data = nullptr;
  check_torch(torch_get_mutable_data_ptr(tensor.get(), &data), "give a tensor's memory");
  return data;
}

// The argument as contiguous values of `dtype`: itself, or a copy that `copy` then owns.
const void* contiguous_as(const Argument& argument, int32_t dtype, Tensor* copy);

// Optional arguments, null or left alone for none; each is on the device of `first`.
// A contiguous int32 tensor of `count` numbers, such as one for each sequence.
const int* read_numbers(const char* name, const Tensor& tensor, const Argument& first, int64_t count);
// (heads) or (batch, heads); and (heads). Others than contiguous fp32 are converted into `copy`.
void read_alibi_slopes(const Tensor& tensor, const Argument& first, int64_t batch, int64_t heads,
                       ScoreModifiers* modifiers, Tensor* copy);
void read_sink(const Tensor& tensor, const Argument& first, int64_t heads, ScoreModifiers* modifiers, Tensor* copy);

// The factors of a quantised tensor `of`, fp32: (batch, KV heads) with any strides; or of blocks of its rows, (batch, heads
// of its own, blocks), with a batch of 1 if it is packed. Those of blocks that are not contiguous are copied into `copy`.
Descale read_descale(const char* name, const Tensor& tensor, const Rows& of, int64_t batch, int64_t heads_kv, Tensor* copy);

// Whether the kernels can use the rows where they are: last dimension contiguous, every row on 16 bytes.
inline bool usable_as_is(const Rows& rows) {
  if (rows.empty()) return true;
  const int64_t step = row_step(rows.argument.dtype);
  if (rows.sizes[3] % step != 0 || rows.strides[3] != 1) return false;
  if (reinterpret_cast<uintptr_t>(rows.argument.data) % 16 != 0) return false;
  for (int i = 0; i < 3; ++i) {
    if (rows.sizes[i] > 1 && rows.strides[i] % step != 0) return false;
  }
  return true;
}

// A dimension of size 1 may have any stride in torch, aligned or not.
inline Strides kernel_strides(const Rows& rows) {
  const auto stride = [&rows](int i) { return rows.sizes[i] > 1 ? rows.strides[i] : 0; };
  return Strides{stride(0), stride(1), stride(2)};
}

// A contiguous tensor of rows whose head dim is padded to a multiple of `step`, and its first sizes[3] columns in use.
class PaddedRows {
 public:
  PaddedRows() = default;
  PaddedRows(const int64_t (&sizes)[4], bool packed, int32_t dtype, int32_t device, int64_t step = kRowStep);

  explicit operator bool() const { return static_cast<bool>(tensor_); }
  void* data() const { return data_of(tensor_); }
  Strides strides() const {
    return Strides{packed_ ? 0 : sizes_[1] * sizes_[2] * columns_, sizes_[2] * columns_, columns_};
  }
  bool has_padding() const { return columns_ != sizes_[3]; }
  void zero() const;
  void zero_padding() const;
  void copy_from(AtenTensorHandle source) const;
  void copy_to(AtenTensorHandle destination) const;
  // The tensor itself, without the padding.
  Tensor take();

 private:
  Tensor columns(int64_t first, int64_t count) const;

  Tensor tensor_;
  int64_t sizes_[4] = {0, 0, 0, 0};
  int64_t columns_ = 0;
  bool packed_ = false;
  int32_t dtype_ = 0;
  int32_t device_ = 0;
};

// An input as the kernels read it: the argument itself, or a copy with contiguous, aligned and zero-padded rows.
class Input {
 public:
  explicit Input(const Rows& rows) {
    if (__builtin_expect(usable_as_is(rows), 1)) {
      data_ = rows.argument.data;
      strides_ = kernel_strides(rows);
    } else {
      copy(rows);
    }
  }
  const void* data() const { return data_; }
  Strides strides() const { return strides_; }

  // Reads from a contiguous copy from here on.
  void copy(const Rows& rows);

 private:

  const void* data_ = nullptr;
  Strides strides_ = {0, 0, 0};
  PaddedRows copy_;
};

// An output: a new contiguous tensor, or one that the caller gives, written in place or, where the kernels cannot,
// through a temporary one.
class Output {
 public:
  Output(const int64_t (&sizes)[4], bool packed, int32_t dtype, int32_t device, int64_t step = kRowStep)
      : made_(sizes, packed, dtype, device, step), data_(made_.data()), strides_(made_.strides()) {}
  explicit Output(const Rows& given);

  void* data() const { return data_; }
  Strides strides() const { return strides_; }
  // Zeros, for rows that no kernel writes. Called before the launch.
  void zero() const;
  // Completes a given output; called after the launch.
  void finish() const;
  // The new tensor; called after the launch.
  Tensor take() { return made_.take(); }

 private:
  AtenTensorHandle given_ = nullptr;
  PaddedRows made_;
  void* data_ = nullptr;
  Strides strides_ = {0, 0, 0};
};

}  // namespace flash_attn
