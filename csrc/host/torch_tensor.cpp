#include "host/torch_tensor.h"

#include <cstdio>

#include "host/error.h"

namespace flash_attn {

void fail_torch(const char* what) {
  const bool has_reason = torch_exception_get_what_without_backtrace != nullptr;
  const char* const reason = has_reason ? torch_exception_get_what_without_backtrace() : nullptr;
  fail("torch could not %s%s%s", what, reason != nullptr ? ": " : "; its log says why.", reason != nullptr ? reason : "");
}

const Constants& constants() {
  static const Constants values;
  return values;
}

const char* dtype_name(int32_t dtype) {
  const Constants& known = constants();
  if (dtype == known.fp16) return "float16";
  if (dtype == known.bf16) return "bfloat16";
  if (dtype == known.fp32) return "float32";
  if (dtype == known.e4m3) return "float8_e4m3fn";
  if (dtype == known.int32) return "int32";
  if (dtype == known.int64) return "int64";
  return "of another dtype";
}

Argument read_argument(const char* name, const Tensor& tensor) {
  Argument argument;
  argument.name = name;
  argument.handle = tensor.get();
  if (argument.handle == nullptr) fail("%s is no tensor.", name);
  int32_t device_type = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  AOTITorchError error = aoti_torch_get_dim(argument.handle, &argument.rank);
  error |= aoti_torch_get_device_type(argument.handle, &device_type);
  error |= aoti_torch_get_device_index(argument.handle, &argument.device);
  error |= aoti_torch_get_dtype(argument.handle, &argument.dtype);
  error |= aoti_torch_get_sizes(argument.handle, &sizes);
  error |= aoti_torch_get_strides(argument.handle, &strides);
  error |= torch_get_const_data_ptr(argument.handle, &argument.data);
  check_torch(error, "describe a tensor");
  argument.sizes = sizes;
  argument.strides = strides;
  if (device_type != constants().cuda) fail("%s is not on a CUDA device.", name);
  return argument;
}

ShapeText::ShapeText(const int64_t* sizes, int64_t rank) {
  size_t used = 0;
  for (int64_t i = 0; i < rank && used < sizeof(text_); ++i) {
    used += static_cast<size_t>(snprintf(text_ + used, sizeof(text_) - used, "%s%lld", i == 0 ? "(" : ", ",
                                         static_cast<long long>(sizes[i])));
  }
  if (used < sizeof(text_)) snprintf(text_ + used, sizeof(text_) - used, "%s)", rank == 0 ? "(" : "");
}

void check_rank(const Argument& argument, int64_t rank) {
  if (argument.rank == rank) return;
  fail("%s has %lld dimensions, not %lld.", argument.name, static_cast<long long>(argument.rank),
       static_cast<long long>(rank));
}

void check_shape(const Argument& argument, const int64_t* expected, int64_t rank) {
  check_rank(argument, rank);
  if (memcmp(argument.sizes, expected, static_cast<size_t>(rank) * sizeof(int64_t)) == 0) return;
  fail("%s has shape %s, expected %s.", argument.name, ShapeText(argument).c_str(), ShapeText(expected, rank).c_str());
}

void check_dtype(const Argument& argument, int32_t dtype) {
  if (argument.dtype == dtype) return;
  fail("%s is %s, expected %s.", argument.name, dtype_name(argument.dtype), dtype_name(dtype));
}

void check_device(const Argument& argument, const Argument& first) {
  if (argument.device == first.device) return;
  fail("%s is on cuda:%d, %s on cuda:%d; all tensors must be on one device.", argument.name, argument.device, first.name,
       first.device);
}

void check_same(const Argument& argument, const Argument& first) {
  if (__builtin_expect(argument.dtype != first.dtype, 0)) {
    fail("%s and %s have different dtypes: %s is %s, %s is %s.", argument.name, first.name, argument.name,
         dtype_name(argument.dtype), first.name, dtype_name(first.dtype));
  }
  check_device(argument, first);
}

bool is_contiguous(const Argument& argument) {
  int64_t expected = 1;
  for (int64_t i = argument.rank - 1; i >= 0; --i) {
    if (argument.sizes[i] > 1 && argument.strides[i] != expected) return false;
    expected *= argument.sizes[i];
  }
  return true;
}

void check_contiguous(const Argument& argument) {
  if (is_contiguous(argument)) return;
  fail("%s of shape %s has strides %s; it must be contiguous.", argument.name, ShapeText(argument).c_str(),
       ShapeText(argument.strides, argument.rank).c_str());
}

Rows read_rows(const char* name, const Tensor& tensor, bool packed) {
  Rows rows;
  rows.argument = read_argument(name, tensor);
  check_rank(rows.argument, packed ? 3 : 4);
  if (packed) {
    rows.sizes[0] = 1;
    rows.strides[0] = 0;
    memcpy(rows.sizes + 1, rows.argument.sizes, 3 * sizeof(int64_t));
    memcpy(rows.strides + 1, rows.argument.strides, 3 * sizeof(int64_t));
  } else {
    memcpy(rows.sizes, rows.argument.sizes, sizeof(rows.sizes));
    memcpy(rows.strides, rows.argument.strides, sizeof(rows.strides));
  }
  return rows;
}

void check_rows(const Rows& rows, const int64_t (&expected)[4]) {
  if (__builtin_expect(memcmp(rows.sizes, expected, sizeof(expected)) == 0, 1)) return;
  const int64_t rank = rows.argument.rank;
  fail("%s has shape %s, expected %s.", rows.argument.name, ShapeText(rows.argument).c_str(),
       ShapeText(expected + 4 - rank, rank).c_str());
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

const void* contiguous_as(const Argument& argument, int32_t dtype, Tensor* copy) {
  if (argument.dtype == dtype && is_contiguous(argument)) return argument.data;
  *copy = empty(argument.sizes, argument.rank, dtype, argument.device);
  check_torch(aoti_torch_copy_(copy->get(), argument.handle, 1), "copy a tensor");
  return data_of(*copy);
}

const int* read_numbers(const char* name, const Tensor& tensor, const Argument& first, int64_t count) {
  if (!tensor) return nullptr;
  const Argument argument = read_argument(name, tensor);
  check_shape(argument, &count, 1);
  check_dtype(argument, constants().int32);
  check_device(argument, first);
  check_contiguous(argument);
  return static_cast<const int*>(argument.data);
}

void read_alibi_slopes(const Tensor& tensor, const Argument& first, int64_t batch, int64_t heads,
                       ScoreModifiers* modifiers, Tensor* copy) {
  if (!tensor) return;
  const Argument slopes = read_argument("alibi_slopes", tensor);
  const int64_t shape[2] = {batch, heads};
  const bool one_batch = slopes.rank == 1;
  check_shape(slopes, one_batch ? shape + 1 : shape, one_batch ? 1 : 2);
  check_device(slopes, first);
  modifiers->alibi_slopes = static_cast<const float*>(contiguous_as(slopes, constants().fp32, copy));
  modifiers->alibi_batch_stride = one_batch ? 0 : heads;
}

void read_sink(const Tensor& tensor, const Argument& first, int64_t heads, ScoreModifiers* modifiers, Tensor* copy) {
  if (!tensor) return;
  const Argument sink = read_argument("sink", tensor);
  check_shape(sink, &heads, 1);
  check_device(sink, first);
  modifiers->sink = static_cast<const float*>(contiguous_as(sink, constants().fp32, copy));
}

Descale read_descale(const char* name, const Tensor& tensor, const Rows& of, int64_t batch, int64_t heads_kv, Tensor* copy) {
  if (!tensor) return Descale{nullptr, 0, 0, 0};
  const Argument descale = read_argument(name, tensor);
  check_dtype(descale, constants().fp32);
  check_device(descale, of.argument);
  if (descale.rank != 3) {
    const int64_t shape[2] = {batch, heads_kv};
    check_shape(descale, shape, 2);
    return Descale{static_cast<const float*>(descale.data), descale.strides[0], descale.strides[1], 0};
  }
  const int64_t rows = of.sizes[1];
  const int64_t blocks = of.packed() ? rows / kDescaleRows + batch : (rows + kDescaleRows - 1) / kDescaleRows;
  const int64_t shape[3] = {of.packed() ? 1 : batch, of.sizes[2], blocks};
  check_shape(descale, shape, 3);
  if (shape[0] * shape[1] * shape[2] > INT32_MAX) fail("%s has more factors than a kernel can count.", name);
  if (blocks == 0) return Descale{nullptr, 0, 0, 0};
  const float* const data = static_cast<const float*>(contiguous_as(descale, constants().fp32, copy));
  return Descale{data, 0, 0, static_cast<int>(blocks)};
}

PaddedRows::PaddedRows(const int64_t (&sizes)[4], bool packed, int32_t dtype, int32_t device, int64_t step)
    : sizes_{sizes[0], sizes[1], sizes[2], sizes[3]},
      columns_(padded(sizes[3], step)),
      packed_(packed),
      dtype_(dtype),
      device_(device) {
  const int64_t all[4] = {sizes[0], sizes[1], sizes[2], columns_};
  tensor_ = empty(packed ? all + 1 : all, packed ? 3 : 4, dtype, device);
}

// Columns [first, first + count) as a view.
Tensor PaddedRows::columns(int64_t first, int64_t count) const {
  const int64_t sizes[4] = {sizes_[0], sizes_[1], sizes_[2], count};
  const int64_t strides[4] = {sizes_[1] * sizes_[2] * columns_, sizes_[2] * columns_, columns_, 1};
  const int skipped = packed_ ? 1 : 0;
  AtenTensorHandle view = nullptr;
  check_torch(
      aoti_torch__reinterpret_tensor(tensor_.get(), 4 - skipped, sizes + skipped, strides + skipped, first, &view),
      "make a view");
  return Tensor(view);
}

void PaddedRows::zero() const { check_torch(aoti_torch_zero_(tensor_.get()), "clear a tensor"); }

void PaddedRows::zero_padding() const {
  if (!has_padding()) return;
  const Tensor padding = columns(sizes_[3], columns_ - sizes_[3]);
  check_torch(aoti_torch_zero_(padding.get()), "clear a tensor");
}

void PaddedRows::copy_from(AtenTensorHandle source) const {
  const Tensor used = columns(0, sizes_[3]);
  check_torch(aoti_torch_copy_(used.get(), source, 1), "copy a tensor");
}

void PaddedRows::copy_to(AtenTensorHandle destination) const {
  const Tensor used = columns(0, sizes_[3]);
  check_torch(aoti_torch_copy_(destination, used.get(), 1), "copy a tensor");
}

Tensor PaddedRows::take() {
  if (__builtin_expect(!has_padding(), 1)) return static_cast<Tensor&&>(tensor_);
  Tensor result = empty(packed_ ? sizes_ + 1 : sizes_, packed_ ? 3 : 4, dtype_, device_);
  copy_to(result.get());
  return result;
}

void Input::copy(const Rows& rows) {
  const int32_t dtype = rows.argument.dtype;
  copy_ = PaddedRows(rows.sizes, rows.packed(), dtype, rows.argument.device, row_step(dtype));
  copy_.copy_from(rows.argument.handle);
  copy_.zero_padding();
  data_ = copy_.data();
  strides_ = copy_.strides();
}

Output::Output(const Rows& given) : given_(given.argument.handle) {
  // An expanded tensor is left to torch, which refuses to write to it.
  bool in_place = usable_as_is(given);
  for (int i = 0; i < 3; ++i) in_place = in_place && (given.sizes[i] <= 1 || given.strides[i] != 0);
  if (in_place) {
    // Asked for once more, as memory that is going to be written.
    check_torch(torch_get_mutable_data_ptr(given_, &data_), "give a tensor's memory");
    strides_ = kernel_strides(given);
    return;
  }
  const int32_t dtype = given.argument.dtype;
  made_ = PaddedRows(given.sizes, given.packed(), dtype, given.argument.device, row_step(dtype));
  data_ = made_.data();
  strides_ = made_.strides();
}

void Output::zero() const {
  if (made_) {
    made_.zero();
  } else {
    check_torch(aoti_torch_zero_(given_), "clear a tensor");
  }
}

void Output::finish() const {
  if (made_ && given_ != nullptr) made_.copy_to(given_);
}

}  // namespace flash_attn
