// From a plain description of a problem to launched kernels: which kernel of the set, which image of it for this GPU,
// the launch's parameters and grid. Knows no torch.
//
// A call first resolves its kernel (an array look-up once it is loaded), then launches it. Both throw
// std::runtime_error with a message that names the kernel's key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/driver.h"
#include "host/kernel_set.h"
#include "params.h"

namespace flash_attn {

enum class Op { fwd, bwd, decode, rotary, round };
enum class Dtype { fp16, bf16, e4m3 };
enum class Mask { full, causal, general };  // the mask kinds of kernels.toml
constexpr int kOps = 5, kDtypes = 3, kMasks = 3;

// The largest head dim that any kernel may have, and the granularity of the caller's head dim.
constexpr int kMaxHeadDim = 256;
constexpr int kHeadDimStep = 8;

// Lengths are below this: they are held in ints in the kernels, where positions of queries and keys are added.
constexpr int64_t kMaxSeqlen = int64_t{1} << 30;

// Of the families that can run on the device, which one to take: the fastest on large problems; the one that costs the
// host and the start of a kernel least, of no account where FLASH_ATTN_FAMILY is set; or the one that alone has ALiBi,
// dropout and any strides.
enum class Preference { throughput, latency, every_feature };
constexpr int kPreferences = 3;

struct KernelQuery {
  Op op;
  Dtype dtype;
  Mask mask;
  int head_dim;  // the caller's, a multiple of kHeadDimStep in 8..kMaxHeadDim
  int device;    // ordinal
  Preference preference;
};

constexpr int kMaxEntryPoints = 3;

// A kernel loaded on one device. Never unloaded.
struct Kernel {
  const Record* record;
  Dtype dtype;
  CUcontext context;
  CUfunction entry[kMaxEntryPoints];  // the op's entry points, in launch order
  unsigned threads[kMaxEntryPoints];  // of a block of each
  int multiprocessors;
  bool tensor_maps;  // of the sm90 family: parameters are FwdTmaParams or BwdTmaParams
  bool waits;        // its code waits for the launch before it where it has to, so that it may begin during that one
  bool halves;       // a multiprocessor has room for two blocks of half of the threads and shared memory
  bool masked;       // of a mask kind that makes some tiles longer than others
};

// Of the kernels that hold the query's head dim and can run on the device, that of the smallest head dim and the
// preferred family, for which the head dim may be a third larger. Loads it at its first use on a device, also while a stream
// is being captured. Safe from several threads.
const Kernel& resolve(const KernelQuery& query);

// What a caller asks of the scores besides scaling, in the words of the Python API.
struct ScoreRequest {
  bool causal = false;
  int64_t window_left = -1;  // negative: unlimited
  int64_t window_right = -1;
  int64_t chunk = 0;
  double softcap = 0;
  double dropout_p = 0;
};

// The mask kind that serves the request: the general one only where something is asked for that, at these longest lengths,
// changes a score and that the other two lack. Fills `modifiers`, whose pointers the caller has set. Throws where
// dropout_p is not in [0, 1).
Mask choose_mask(const ScoreRequest& request, int seqlen_q, int seqlen_k, ScoreModifiers* modifiers);

// How a kernel that deals out its tiles itself does so; of no account to others.
struct TileOptions {
  int64_t sm_margin = 0;    // multiprocessors that are left to other kernels; one works whatever it is
  int* counter = nullptr;   // in device memory, of any value: thread blocks take the tiles as they come
};

// Whether a launch with these params is faster with a TileOptions::counter. As launch_fwd.
bool wants_tile_counter(const Kernel& kernel, const FwdParams& params);

// Launches flash_fwd. The caller has set pointers, strides, batch, heads, heads_kv, seqlen_q, seqlen_k, head dims and
// scale, and what applies of sequences and modifiers; the rest is set here. `key_rows`: rows of the k tensor. False, and
// nothing launched, where the kernel works by tensor maps and these strides cannot be put into one.
bool launch_fwd(const Kernel& kernel, FwdParams& params, int64_t key_rows, const TileOptions& options, CUstream stream);

// Bytes that flash_transpose_v writes V to. Sets params.blocks_n and params.v_tiles_of_head; the caller has set what
// launch_fwd asks for. `key_rows`: rows of the k tensor.
int64_t fp8_workspace(const Kernel& kernel, FwdFp8Params& params, int64_t key_rows);

// Launches flash_transpose_v and flash_fwd of dtype e4m3. As launch_fwd; the factors and v_tiles are set too.
bool launch_fwd_fp8(const Kernel& kernel, FwdFp8Params& params, int64_t key_rows, int64_t sm_margin, CUstream stream);

// Floats that the kernels of Op::round work in, `sums` first. Sets what of `params` follows from its tasks' rows, heads,
// columns and means, batch and heads_kv.
int64_t fp8_rounding_workspace(const Kernel& kernel, Fp8RoundingParams& params);

// Launches the three kernels that turn q, k and v into e4m3. The caller has set everything else of `params`.
void launch_fp8_rounding(const Kernel& kernel, const Fp8RoundingParams& params, CUstream stream);

// Sets `count` floats to minus infinity: the log-sum-exp of rows that no kernel writes.
void fill_minus_infinity(const Kernel& kernel, float* values, int64_t count, CUstream stream);

// Where bwd's workspaces lie in one fp32 buffer of `total` elements, in elements from its start.
struct BwdWorkspace {
  int total_tiles;
  int64_t dq_accum;
  int64_t lse_log2;
  int64_t delta;
  int64_t dq_semaphore;
  int64_t dq_finished;
  int64_t next_block;
  int64_t total;
};
// `total_q`: rows of packed queries; of no account where params.sequences.cu_seqlens_q is null.
BwdWorkspace bwd_workspace(const Kernel& kernel, const BwdParams& params, int64_t total_q);

// Launches the three kernels of the backward pass. As launch_fwd, also in what it returns; `buffer` is what `workspace`
// asks for.
bool launch_bwd(const Kernel& kernel, BwdParams& params, const BwdWorkspace& workspace, float* buffer, int64_t key_rows,
                CUstream stream);

// For divisions by a number below 2^31. By 0, which a launch without blocks may have, all results are 0.
Divisor divisor(unsigned d);

// Up to 16 rows fit into one warp, and the family that has such kernels serves them; of more, the fastest one. The caller has
// set heads, heads_kv and seqlen_q.
Preference decode_preference(const DecodeParams& params);

// Into how many parts each cache is cut: `asked`, or, where that is 0, the fewest that fill the GPU well. Sets
// params.row_warps and params.row_tiles.
int decode_splits(const Kernel& kernel, DecodeParams& params, int64_t asked);

// Launches flash_decode and, for several splits, flash_combine. As launch_fwd. Both wait for whatever is before them on the
// stream in the kernel.
void launch_decode(const Kernel& kernel, DecodeParams& params, CUstream stream);

// Launches flash_rotary for all tasks.
void launch_rotary(const Kernel& kernel, const RotaryParams& params, CUstream stream);

// Whether this library and its kernel set can run on the device; `reason` (size bytes) is filled either way. Creates no
// context and loads nothing.
bool supported(int device, char* reason, size_t size);

}  // namespace flash_attn
