// The CUDA driver, found at run time through dlopen("libcuda.so.1"), so that neither building nor importing needs one.
// Only what is used is declared, with the driver's own names; values are those of the driver's stable ABI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_attn {

using CUresult = int;
using CUdevice = int;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = struct CUstream_st*;
using CUdeviceptr = unsigned long long;

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_NO_BINARY_FOR_GPU = 209;
constexpr CUresult CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221;
constexpr CUresult CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222;
constexpr CUresult CUDA_ERROR_JIT_COMPILATION_DISABLED = 223;

constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16;
constexpr int CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97;
constexpr int CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0;
constexpr int CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6;
constexpr int CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9;
constexpr int CU_TENSOR_MAP_INTERLEAVE_NONE = 0;
constexpr int CU_TENSOR_MAP_SWIZZLE_64B = 2;
constexpr int CU_TENSOR_MAP_SWIZZLE_128B = 3;
constexpr int CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3;
constexpr int CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0;
constexpr int CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0;
constexpr int CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1;
constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
constexpr int CU_JIT_ERROR_LOG_BUFFER = 5;
constexpr int CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6;

struct CUlaunchAttribute {
  int id;
  union {
    char bytes[64];
    int programmaticStreamSerializationAllowed;
  } value alignas(8);
};
constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuDriverGetVersion)(int* version);
  CUresult (*cuGetErrorName)(CUresult error, const char** text);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGetCount)(int* count);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDeviceGetName)(char* name, int length, CUdevice device);
  CUresult (*cuDeviceGetAttribute)(int* value, int attribute, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuCtxGetCurrent)(CUcontext* context);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CUresult (*cuModuleLoadDataEx)(CUmodule* module, const void* image, unsigned count, int* options, void** values);
  CUresult (*cuModuleUnload)(CUmodule module);
  CUresult (*cuModuleGetFunction)(CUfunction* function, CUmodule module, const char* name);
  CUresult (*cuFuncGetAttribute)(int* value, int attribute, CUfunction function);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuMemsetD32Async)(CUdeviceptr address, unsigned value, size_t count, CUstream stream);
  CUresult (*cuTensorMapEncodeTiled)(void* map, int data_type, unsigned rank, void* address, const uint64_t* sizes,
                                     const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                                     int interleave, int swizzle, int l2_promotion, int oob_fill);
  CUresult (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream,
                             void** parameters, void** extra);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra);

  // Whether a launch may begin while the one before it ends. CUDA graphs capture such launches since 12.3.
  bool overlaps_launches;
};

// The driver, loaded and initialised by the first call that succeeds; a failure is tried again by the next call.
// Safe from several threads. Throws std::runtime_error where there is no driver or it does not work.
const Driver& driver();

// "CUDA_ERROR_NAME (the driver's description)" for messages.
class ErrorText {
 public:
  ErrorText(const Driver& cuda, CUresult error);
  const char* c_str() const { return text_; }

 private:
  char text_[256];
};

// Throws "<what> failed: CUDA_ERROR_NAME (...)" unless `error` is success.
void check(const Driver& cuda, CUresult error, const char* what);

// What is known of a GPU without creating a context on it.
struct DeviceFacts {
  int ordinal;
  CUdevice handle;
  int major;
  int minor;
  int multiprocessors;
  int shared_bytes;  // largest shared memory a block may ask for
  char name[128];

  int capability() const { return 10 * major + minor; }
};

// Throws where the ordinal is not one of the driver's devices.
DeviceFacts device_facts(const Driver& cuda, int ordinal);

// Makes `context` current for the scope's life. Does nothing where it is current already, which is the usual case; the
// thread's own context, hence torch's current device, is back afterwards.
class CurrentContext {
 public:
  CurrentContext(const Driver& cuda, CUcontext context) : cuda_(cuda) {
    CUcontext now = nullptr;
    check(cuda, cuda.cuCtxGetCurrent(&now), "reading the current CUDA context");
    if (now == context) return;
    check(cuda, cuda.cuCtxPushCurrent(context), "making the tensor's device current");
    pushed_ = true;
  }
  ~CurrentContext() {
    CUcontext popped;
    if (pushed_) cuda_.cuCtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& cuda_;
  bool pushed_ = false;
};

// Lets this thread load modules while a stream of the process is being captured into a CUDA graph: in the default
// mode the driver would refuse such calls, or end the capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& cuda) : cuda_(cuda) { cuda_.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cuda_.cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const Driver& cuda_;
  int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// The path of the file that holds this library, or nullptr. The text lives as long as the library.
const char* library_path();

}  // namespace flash_attn
