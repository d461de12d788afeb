// Drives the torch-free part of the host library from standard input, one command a line, one answer a line: "ok ..." or
// "error <message>".
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "host/dispatch.h"
#include "host/driver.h"
#include "host/error.h"
#include "host/kernel_set.h"

extern "C" const char* flash_attn_version(void);
extern "C" int flash_attn_device_count(char* error, size_t n);
extern "C" int flash_attn_supported(int device, char* reason, size_t n);
extern "C" int flash_attn_capability(int device);

namespace fa = flash_attn;

namespace {

struct Shape {
  int device, head_dim, batch, seqlen_q, seqlen_k, heads, heads_kv;
  fa::Dtype dtype;
  fa::Mask mask;
  long long packed_q;  // rows of packed queries, or -1
  fa::Preference preference;
  long long sm_margin;
  bool any_order;  // of a backward: not deterministic
};

bool read_shape(const char* text, Shape* shape) {
  char dtype[8], mask[8];
  shape->packed_q = -1;
  const int read = sscanf(text, "%d %7s %7s %d %d %d %d %d %d packed %lld", &shape->device, dtype, mask, &shape->head_dim,
                          &shape->batch, &shape->seqlen_q, &shape->seqlen_k, &shape->heads, &shape->heads_kv,
                          &shape->packed_q);
  if (read != 9 && read != 10) return false;
  shape->preference = strstr(text, " latency") != nullptr ? fa::Preference::latency : fa::Preference::throughput;
  const char* const margin = strstr(text, " margin ");
  shape->sm_margin = margin != nullptr ? atoll(margin + strlen(" margin ")) : 0;
  shape->any_order = strstr(text, " any_order") != nullptr;
  shape->dtype = strcmp(dtype, "bf16") == 0   ? fa::Dtype::bf16
                 : strcmp(dtype, "e4m3") == 0 ? fa::Dtype::e4m3
                                              : fa::Dtype::fp16;
  shape->mask = fa::Mask::full;
  if (strcmp(mask, "causal") == 0) shape->mask = fa::Mask::causal;
  if (strcmp(mask, "general") == 0) shape->mask = fa::Mask::general;
  return true;
}

template <typename Params>
Params params_of(const Shape& shape) {
  Params params;
  memset(&params, 0, sizeof(params));
  params.batch = shape.batch;
  params.heads = shape.heads;
  params.heads_kv = shape.heads_kv;
  params.seqlen_q = shape.seqlen_q;
  params.seqlen_k = shape.seqlen_k;
  params.head_dim = shape.head_dim;
  params.head_dim_v = shape.head_dim;
  static const int starts[1] = {0};  // never read
  if (shape.packed_q >= 0) params.sequences.cu_seqlens_q = starts;
  params.scale = 0.125f;
  return params;
}

// Of sizes far beyond a launch too, where they wrap around.
fa::Strides contiguous(unsigned long long rows, unsigned long long heads, long long head_dim) {
  const auto row = static_cast<long long>(heads * head_dim);
  return {static_cast<long long>(rows * heads * head_dim), row, head_dim};
}

const fa::CUstream kStream = reinterpret_cast<fa::CUstream>(0x77);

// Of q, k and v of one head dim, keys and values less their means.
std::string run_rounding(const Shape& shape) {
  const fa::Kernel& kernel = fa::resolve(
      {fa::Op::round, fa::Dtype::e4m3, fa::Mask::general, shape.head_dim, shape.device, fa::Preference::throughput});
  fa::Fp8RoundingParams params = {};
  params.batch = shape.batch;
  params.heads_kv = shape.heads_kv;
  for (int i = 0; i < 3; ++i) {
    params.task[i].rows = i == 0 ? shape.seqlen_q : shape.seqlen_k;
    params.task[i].heads = i == 0 ? shape.heads : shape.heads_kv;
    params.task[i].columns = shape.head_dim;
    params.task[i].smooth = i > 0 ? 1 : 0;
  }
  const long long floats = fa::fp8_rounding_workspace(kernel, params);
  fa::launch_fp8_rounding(kernel, params, kStream);
  return "ok floats=" + std::to_string(floats) + " parts=" + std::to_string(params.parts);
}

// "packed": the rows of packed queries, and of packed keys as many.
std::string run_fp8(const fa::Kernel& kernel, const Shape& shape) {
  fa::FwdFp8Params params;
  memset(&params, 0, sizeof(params));
  fa::FwdParams& fwd = params.tma.fwd;
  fwd = params_of<fa::FwdParams>(shape);
  const long long key_rows = shape.packed_q >= 0 ? shape.packed_q : shape.seqlen_k;
  fwd.sequences.cu_seqlens_k = fwd.sequences.cu_seqlens_q;
  fwd.q_stride = contiguous(shape.seqlen_q, shape.heads, shape.head_dim);
  fwd.k_stride = fwd.v_stride = contiguous(shape.seqlen_k, shape.heads_kv, shape.head_dim);
  fwd.lse_head_stride = shape.packed_q >= 0 ? shape.packed_q : shape.seqlen_q;
  const long long workspace = fa::fp8_workspace(kernel, params, key_rows);
  const bool launched = fa::launch_fwd_fp8(kernel, params, key_rows, shape.sm_margin, kStream);
  return (launched ? "ok workspace=" : "ok without a map workspace=") + std::to_string(workspace) +
         " tiles=" + std::to_string(params.v_tiles_of_head);
}

std::string run_kernel(fa::Op op, const Shape& shape) {
  try {
    const fa::Kernel& kernel = fa::resolve({op, shape.dtype, shape.mask, shape.head_dim, shape.device, shape.preference});
    if (op == fa::Op::fwd && shape.dtype == fa::Dtype::e4m3) return run_fp8(kernel, shape);
    const fa::Strides query_stride = contiguous(shape.seqlen_q, shape.heads, shape.head_dim);
    const fa::Strides key_stride = contiguous(shape.seqlen_k, shape.heads_kv, shape.head_dim);
    if (op == fa::Op::fwd) {
      fa::FwdParams params = params_of<fa::FwdParams>(shape);
      params.q_stride = query_stride;
      params.k_stride = params.v_stride = key_stride;
      params.lse_head_stride = shape.seqlen_q;
      fa::TileOptions tiles;
      tiles.sm_margin = shape.sm_margin;
      alignas(64) static int counter[1] = {7};
      if (fa::wants_tile_counter(kernel, params)) tiles.counter = counter;
      if (fa::launch_fwd(kernel, params, shape.seqlen_k, tiles, kStream)) return "ok";
      return "ok without a map";
    }
    fa::BwdParams params = params_of<fa::BwdParams>(shape);
    params.q_stride = params.dout_stride = query_stride;
    params.k_stride = params.v_stride = key_stride;
    params.lse_head_stride = shape.seqlen_q;
    params.deterministic = shape.any_order ? 0 : 1;
    const fa::BwdWorkspace workspace = fa::bwd_workspace(kernel, params, shape.packed_q);
    // Only the addresses matter here: nothing is computed.
    alignas(64) static float origin[1];
    const bool launched = fa::launch_bwd(kernel, params, workspace, origin, shape.seqlen_k, kStream);
    return "ok workspace=" + std::to_string(workspace.total) + (launched ? "" : " without a map");
  } catch (const std::exception& error) {
    return std::string("error ") + error.what();
  }
}

// causal window_left window_right chunk softcap dropout_p alibi sink rng seqlen_q seqlen_k, the pointers as 0 or 1.
std::string choose_mask(const char* text) {
  fa::ScoreRequest request;
  fa::ScoreModifiers modifiers = {};
  long long left, right, chunk;
  int causal, alibi, sink, rng, seqlen_q, seqlen_k;
  if (sscanf(text, "%d %lld %lld %lld %lf %lf %d %d %d %d %d", &causal, &left, &right, &chunk, &request.softcap,
             &request.dropout_p, &alibi, &sink, &rng, &seqlen_q, &seqlen_k) != 11) {
    return "error arguments of mask";
  }
  request.causal = causal != 0;
  request.window_left = left;
  request.window_right = right;
  request.chunk = chunk;
  static const float floats[1] = {0};
  static const unsigned long long state[2] = {0, 0};
  if (alibi != 0) modifiers.alibi_slopes = floats;
  if (sink != 0) modifiers.sink = floats;
  if (rng != 0) modifiers.rng_state = state;
  const fa::Mask mask = fa::choose_mask(request, seqlen_q, seqlen_k, &modifiers);
  const char* const names[] = {"full", "causal", "general"};
  char answer[256];
  snprintf(answer, sizeof(answer), "ok %s left=%d right=%d chunk=%d softcap=%g rng=%d threshold=%u keep_scale=%g",
           names[static_cast<int>(mask)], modifiers.window_left, modifiers.window_right, modifiers.chunk,
           static_cast<double>(modifiers.softcap), modifiers.rng_state != nullptr, modifiers.drop_threshold,
           static_cast<double>(modifiers.keep_scale));
  return answer;
}

std::string answer(const std::string& line) {
  const size_t space = line.find(' ');
  const std::string command = line.substr(0, space);
  const std::string rest = space == std::string::npos ? "" : line.substr(space + 1);
  char text[8192];
  Shape shape;
  try {
    if (command == "version") return std::string("ok ") + flash_attn_version();
    if (command == "count") {
      const int count = flash_attn_device_count(text, sizeof(text));
      return count >= 0 ? "ok " + std::to_string(count) : std::string("error ") + text;
    }
    if (command == "supported") {
      const int yes = flash_attn_supported(atoi(rest.c_str()), text, sizeof(text));
      return std::string(yes ? "ok yes " : "ok no ") + text;
    }
    if (command == "short") {  // a reason cut to the caller's buffer
      memset(text, 'x', sizeof(text));
      flash_attn_supported(0, text, 16);
      return std::string("ok ") + std::to_string(strlen(text)) + (text[16] == 'x' ? " intact" : " overrun");
    }
    if (command == "capability") return "ok " + std::to_string(flash_attn_capability(atoi(rest.c_str())));
    if (command == "open") {
      const fa::KernelSet set(rest.c_str());
      return "ok " + std::to_string(set.size()) + " " + set.compiler();
    }
    if (command == "env") {
      const size_t equals = rest.find('=');
      setenv(rest.substr(0, equals).c_str(), rest.substr(equals + 1).c_str(), 1);
      return "ok";
    }
    if (command == "move") {
      const size_t middle = rest.find(' ');
      return rename(rest.substr(0, middle).c_str(), rest.substr(middle + 1).c_str()) == 0 ? "ok" : "error rename";
    }
    if (command == "mode") {  // the thread's stream capture mode, left as it is
      int now = 0;
      fa::driver().cuThreadExchangeStreamCaptureMode(&now);
      snprintf(text, sizeof(text), "ok %d", now);
      fa::driver().cuThreadExchangeStreamCaptureMode(&now);
      return text;
    }
    if (command == "push") {
      fa::CUcontext context = nullptr;
      fa::driver().cuDevicePrimaryCtxRetain(&context, atoi(rest.c_str()));
      fa::driver().cuCtxPushCurrent(context);
      return "ok";
    }
    if (command == "current") {
      fa::CUcontext context = nullptr;
      fa::driver().cuCtxGetCurrent(&context);
      snprintf(text, sizeof(text), "ok %d", context == nullptr ? -1 : static_cast<int>(reinterpret_cast<size_t>(context)) - 0x1000);
      return text;
    }
    if (command == "mask") return choose_mask(rest.c_str());
    if (command == "fill" && read_shape(rest.c_str(), &shape)) {
      float values[1];
      const fa::Kernel& kernel = fa::resolve({fa::Op::fwd, shape.dtype, shape.mask, shape.head_dim, shape.device, shape.preference});
      fa::fill_minus_infinity(kernel, values, shape.batch, kStream);
      return "ok";
    }
    if (command == "decode" && read_shape(rest.c_str(), &shape)) {  // "asked": in place of rows of packed queries
      fa::DecodeParams params = params_of<fa::DecodeParams>(shape);
      const fa::Kernel& kernel = fa::resolve(
          {fa::Op::decode, shape.dtype, shape.mask, shape.head_dim, shape.device, fa::decode_preference(params)});
      params.lse_head_stride = shape.seqlen_q;
      params.lse_count = int64_t{params.batch} * params.heads * shape.seqlen_q;
      params.splits = fa::decode_splits(kernel, params, shape.packed_q > 0 ? shape.packed_q : 0);
      fa::launch_decode(kernel, params, kStream);
      return "ok splits=" + std::to_string(params.splits) + " row_warps=" + std::to_string(params.row_warps);
    }
    if (command == "fwd" && read_shape(rest.c_str(), &shape)) return run_kernel(fa::Op::fwd, shape);
    if (command == "bwd" && read_shape(rest.c_str(), &shape)) return run_kernel(fa::Op::bwd, shape);
    if (command == "round" && read_shape(rest.c_str(), &shape)) return run_rounding(shape);
    if (command == "threads" && read_shape(rest.c_str(), &shape)) {
      std::vector<std::string> answers(8);
      std::vector<std::thread> threads;
      for (std::string& one : answers) threads.emplace_back([&one, shape] { one = run_kernel(fa::Op::fwd, shape); });
      for (std::thread& thread : threads) thread.join();
      for (const std::string& one : answers) {
        if (one != "ok") return one;
      }
      return "ok";
    }
  } catch (const std::exception& error) {
    return std::string("error ") + error.what();
  }
  return "error unknown command: " + line;
}

}  // namespace

int main() {
  char line[4096];
  while (fgets(line, sizeof(line), stdin) != nullptr) {
    line[strcspn(line, "\n")] = 0;
    printf("%s\n", answer(line).c_str());
    fflush(stdout);
  }
  return 0;
}
