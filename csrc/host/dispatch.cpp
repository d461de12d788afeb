// The second half of dispatch.h: parameters and grids of launches.
#include "host/dispatch.h"

#include <cstring>

#include "host/error.h"

namespace flash_attn {

namespace {

constexpr int64_t kMaxGrid = 2147483647;
constexpr int kWarpRows = 16;  // of flash_decode

// Blocks that cover `length`, and a 1-D grid of them for every head and batch.
int64_t blocks_of(int64_t length, int64_t block) { return (length + block - 1) / block; }

unsigned grid_of(const Kernel& kernel, int64_t blocks, int64_t heads, int64_t batch) {
  int64_t heads_and_batch = 0, grid = 0;
  if (__builtin_mul_overflow(heads, batch, &heads_and_batch) ||
      __builtin_mul_overflow(blocks, heads_and_batch, &grid) || grid > kMaxGrid) {
    fail("kernel %s: %lld tiles x %lld heads x %lld sequences are more than the %lld blocks of a launch. Split the batch.",
         kernel.record->key, static_cast<long long>(blocks), static_cast<long long>(heads),
         static_cast<long long>(batch), static_cast<long long>(kMaxGrid));
  }
  return static_cast<unsigned>(grid);
}

void check_launch(const Kernel& kernel, int entry, CUresult error, unsigned grid, unsigned shared_bytes) {
  if (__builtin_expect(error != CUDA_SUCCESS, 0)) {
    fail("launching kernel %s (arch %s) with %u blocks of %u threads and %u bytes of shared memory failed: %s.",
         kernel.record->key, kernel.record->arch, grid, kernel.threads[entry], shared_bytes,
         ErrorText(driver(), error).c_str());
  }
}

template <typename Params>
void launch(const Driver& cuda, const Kernel& kernel, int entry, unsigned grid, unsigned shared_bytes, Params* params,
            CUstream stream, unsigned grid_y = 1, unsigned threads = 0) {
  if (grid == 0) return;
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(params))};
  const CUresult error = cuda.cuLaunchKernel(kernel.entry[entry], grid, grid_y, 1, threads != 0 ? threads : kernel.threads[entry],
                                             1, 1, shared_bytes, stream, arguments, nullptr);
  check_launch(kernel, entry, error, grid, shared_bytes);
}

// A launch that may begin while the one before it on the stream ends, where the kernel's code waits for what it needs of it.
template <typename Params>
void launch_early(const Driver& cuda, const Kernel& kernel, int entry, unsigned grid, unsigned shared_bytes, Params* params,
                  CUstream stream, unsigned threads = 0) {
  if (!kernel.waits) return launch(cuda, kernel, entry, grid, shared_bytes, params, stream, 1, threads);
  if (grid == 0) return;
  CUlaunchAttribute overlap = {};
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  const unsigned block = threads != 0 ? threads : kernel.threads[entry];
  CUlaunchConfig config = {grid, 1, 1, block, 1, 1, shared_bytes, stream, &overlap, 1};
  void* arguments[] = {const_cast<void*>(static_cast<const void*>(params))};
  check_launch(kernel, entry, cuda.cuLaunchKernelEx(&config, kernel.entry[entry], arguments, nullptr), grid, shared_bytes);
}

template <typename Params>
void complete(const Kernel& kernel, Params& params) {
  constexpr double kLog2E = 1.4426950408889634;
  params.group = params.heads_kv > 0 ? params.heads / params.heads_kv : 1;
  params.blocks_m = static_cast<int>(blocks_of(params.seqlen_q, kernel.record->block_m));
  params.scale_log2 = static_cast<float>(params.scale * kLog2E);
}

}  // namespace

Mask choose_mask(const ScoreRequest& request, int seqlen_q, int seqlen_k, ScoreModifiers* modifiers) {
  if (!(request.dropout_p >= 0 && request.dropout_p < 1)) {
    fail("dropout_p is %g; it must be at least 0 and below 1.", request.dropout_p);
  }
  ScoreModifiers& m = *modifiers;
  // A bound as far away as the longest sequence hides nothing, and keeps the kernels' sums of positions within an int.
  const auto bound = [](int64_t window, int length) {
    return static_cast<int>(window < 0 || window > length ? length : window);
  };
  m.window_left = bound(request.window_left, seqlen_k);
  m.window_right = request.causal ? 0 : bound(request.window_right, seqlen_q);
  m.chunk = static_cast<int>(request.chunk < 0 ? 0 : request.chunk < kUnlimited ? request.chunk : kUnlimited);
  m.softcap = static_cast<float>(request.softcap);
  if (request.dropout_p > 0) {
    m.drop_threshold = static_cast<unsigned>(request.dropout_p * 4294967296.0);
    m.keep_scale = static_cast<float>(1 / (1 - request.dropout_p));
  } else {
    m.rng_state = nullptr;
  }
  // The last query stands at the last key and sees `window_left` keys before it, the first one all but the last
  // seqlen_q - 1 keys by itself.
  const bool left_hides = m.window_left < seqlen_k - 1;
  const bool right_hides = request.causal || m.window_right < seqlen_q - 1;
  if (left_hides || (right_hides && m.window_right != 0) || m.chunk > 0 || m.softcap > 0 || m.alibi_slopes != nullptr ||
      m.sink != nullptr || m.rng_state != nullptr) {
    return Mask::general;
  }
  return right_hides ? Mask::causal : Mask::full;
}

namespace {

// What the tensor maps of a kernel have in common: the boxes' columns are 128 bytes, or 64 where a row has no more.
struct MapFormat {
  int type;
  int bytes;  // of an element
  unsigned columns;
  int swizzle;
};

MapFormat map_format(const Kernel& kernel) {
  if (kernel.dtype != Dtype::e4m3) {
    const bool bf16 = kernel.dtype == Dtype::bf16;
    return {bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, 64, CU_TENSOR_MAP_SWIZZLE_128B};
  }
  if (kernel.record->head_dim < 128) return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, 64, CU_TENSOR_MAP_SWIZZLE_64B};
  return {CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, 128, CU_TENSOR_MAP_SWIZZLE_128B};
}

// The tensor map of q, dout, k or v: (D, S, H, B), or (D, T, H, 1) if packed, with boxes of `box_rows` rows. False where
// the driver cannot describe the strides.
bool encode_map(const Driver& cuda, unsigned char* map, const Kernel& kernel, const void* data, const Strides& stride,
                int64_t head_dim, int64_t rows, int64_t heads, int64_t batch, unsigned box_rows) {
  const MapFormat format = map_format(kernel);
  const uint64_t sizes[4] = {static_cast<uint64_t>(head_dim), static_cast<uint64_t>(rows), static_cast<uint64_t>(heads),
                             static_cast<uint64_t>(batch)};
  // A dimension of one element has no stride to speak of; the driver wants a valid one.
  const auto bytes = [&](long long elements, int64_t size) {
    return static_cast<uint64_t>(size > 1 ? elements * format.bytes : 16);
  };
  const uint64_t strides[3] = {bytes(stride.row, rows), bytes(stride.head, heads), bytes(stride.batch, batch)};
  const unsigned box[4] = {format.columns, box_rows, 1, 1};
  const unsigned steps[4] = {1, 1, 1, 1};
  return cuda.cuTensorMapEncodeTiled(map, format.type, 4, const_cast<void*>(data), sizes, strides, box, steps,
                                     CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_q_map(const Driver& cuda, unsigned char* map, const Kernel& kernel, const FwdParams& fwd) {
  const int64_t batch = fwd.sequences.cu_seqlens_q != nullptr ? 1 : fwd.batch;
  // Each warpgroup's rows are fetched alone, but for those of FP8 kernels.
  const unsigned rows = kernel.dtype == Dtype::e4m3 ? kernel.record->block_m : 64;
  return encode_map(cuda, map, kernel, fwd.q, fwd.q_stride, fwd.head_dim, fwd.lse_head_stride, fwd.heads, batch, rows);
}

// Of k or v.
bool encode_keys_map(const Driver& cuda, unsigned char* map, const Kernel& kernel, const FwdParams& fwd, const void* data,
                     const Strides& stride, int64_t head_dim, int64_t key_rows) {
  const int64_t batch = fwd.sequences.cu_seqlens_k != nullptr ? 1 : fwd.batch;
  return encode_map(cuda, map, kernel, data, stride, head_dim, key_rows, fwd.heads_kv, batch, kernel.record->block_n);
}

// The grid of a kernel that deals out its tiles itself: at most one block a multiprocessor.
unsigned persistent_grid(const Kernel& kernel, const FwdParams& fwd, int64_t sm_margin) {
  const unsigned tiles = grid_of(kernel, fwd.blocks_m, fwd.heads, fwd.batch);
  const int64_t left = kernel.multiprocessors - sm_margin;
  const unsigned multiprocessors = left > 1 ? static_cast<unsigned>(left) : 1;
  return tiles < multiprocessors ? tiles : multiprocessors;
}

// Whether sequences have different lengths, so that their tiles do.
bool lengths_vary(const FwdParams& fwd) {
  return fwd.sequences.cu_seqlens_q != nullptr || fwd.sequences.seqused_q != nullptr;
}

// Whether the last tile of each head leaves a warpgroup, which has 64 rows, without work. 132 multiprocessors are a multiple
// of the 6 and 22 tiles of 192 rows that 1,024 and 4,096 queries have: dealt in rounds, all such tiles come to the same third.
bool has_short_tile(const Kernel& kernel, const FwdParams& fwd) {
  const int block_m = static_cast<int>(kernel.record->block_m);
  const int rest = fwd.seqlen_q % block_m;
  return rest > 0 && rest + 64 <= block_m;
}

// Heads whose tiles are dealt out together in rounds, the longest first. Every other round goes the other way: where they
// fill an even number of rounds, each thread block's tiles add up to the same. Of what is left at the end, the last are short.
int heads_of_even_rounds(const FwdParams& fwd, unsigned grid) {
  constexpr int64_t kBytes = int64_t{36} << 20;  // of K and V, which are to stay in L2 meanwhile
  const int64_t tiles_of_two_rounds = 2 * static_cast<int64_t>(grid);
  const int64_t pairs = static_cast<int64_t>(fwd.batch) * fwd.heads;
  int64_t divisor = tiles_of_two_rounds;  // the greatest common one of it and a head's tiles
  for (int64_t rest = fwd.blocks_m; rest != 0;) {
    const int64_t next = divisor % rest;
    divisor = rest;
    rest = next;
  }
  const int64_t even = tiles_of_two_rounds / divisor;
  const int64_t heads = even < pairs ? even : pairs;
  const int64_t bytes_of_a_head = 2 * static_cast<int64_t>(fwd.seqlen_k) * (fwd.head_dim + fwd.head_dim_v) / fwd.group;
  return heads * bytes_of_a_head <= kBytes ? static_cast<int>(heads) : 1;
}

bool launch_fwd_tma(const Driver& cuda, const Kernel& kernel, const FwdParams& fwd, int64_t key_rows,
                    const TileOptions& options, CUstream stream) {
  if (key_rows == 0) return false;  // an empty tensor has no map
  FwdTmaParams params;
  params.fwd = fwd;
  if (!encode_q_map(cuda, params.q_map, kernel, fwd) ||
      !encode_keys_map(cuda, params.k_map, kernel, fwd, fwd.k, fwd.k_stride, fwd.head_dim, key_rows) ||
      !encode_keys_map(cuda, params.v_map, kernel, fwd, fwd.v, fwd.v_stride, fwd.head_dim_v, key_rows)) {
    return false;
  }
  // Measured on an H200: where tiles differ, those of 32 heads together, the longest first, or, without a
  // counter, of as many as fill an even number of rounds; else one head after another.
  constexpr int kHeadsOfAGroup = 32;
  const bool differ = kernel.masked || (has_short_tile(kernel, fwd) && !lengths_vary(fwd));
  const unsigned grid = persistent_grid(kernel, fwd, options.sm_margin);
  params.heads_per_group = 1;
  if (options.counter != nullptr) {
    if (differ) params.heads_per_group = kHeadsOfAGroup;
  } else if (kernel.masked && grid > 0) {
    params.heads_per_group = heads_of_even_rounds(fwd, grid);
  }
  params.next_tile = options.counter;
  if (options.counter != nullptr && grid > 0) {
    const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(options.counter);
    check(cuda, cuda.cuMemsetD32Async(address, 0, 1, stream), "clearing the counter of tiles");
  }
  launch(cuda, kernel, 0, grid, kernel.record->smem_bytes, &params, stream);
  return true;
}

}  // namespace

bool wants_tile_counter(const Kernel& kernel, const FwdParams& params) {
  if (!kernel.tensor_maps || kernel.dtype == Dtype::e4m3) return false;
  // Measured on an H200: of short masked sequences of one length, and of equal tiles, each thread block's share is as good,
  // and has no memory to clear.
  constexpr int64_t kShort = 16;
  const int64_t blocks = blocks_of(params.seqlen_q, kernel.record->block_m);
  const bool differ = kernel.masked ? blocks >= kShort : has_short_tile(kernel, params);
  if (!lengths_vary(params) && !differ) return false;
  return grid_of(kernel, blocks, params.heads, params.batch) > static_cast<unsigned>(kernel.multiprocessors);
}

bool launch_fwd(const Kernel& kernel, FwdParams& params, int64_t key_rows, const TileOptions& options, CUstream stream) {
  const Driver& cuda = driver();
  complete(kernel, params);
  const CurrentContext current(cuda, kernel.context);
  if (kernel.tensor_maps) return launch_fwd_tma(cuda, kernel, params, key_rows, options, stream);
  const unsigned grid = grid_of(kernel, params.blocks_m, params.heads, params.batch);
  launch(cuda, kernel, 0, grid, kernel.record->smem_bytes, &params, stream);
  return true;
}

int64_t fp8_workspace(const Kernel& kernel, FwdFp8Params& params, int64_t key_rows) {
  const FwdParams& fwd = params.tma.fwd;
  const int64_t block_n = kernel.record->block_n;
  params.blocks_n = static_cast<int>(blocks_of(fwd.seqlen_k, block_n));
  // As in bwd_workspace.
  const int64_t tiles_of_a_head = fwd.sequences.cu_seqlens_k != nullptr
                                      ? key_rows / block_n + fwd.batch
                                      : static_cast<int64_t>(fwd.batch) * params.blocks_n;
  const int64_t tiles = grid_of(kernel, tiles_of_a_head, fwd.heads_kv, 1);
  params.v_tiles_of_head = static_cast<int>(fwd.heads_kv > 0 ? tiles_of_a_head : 0);
  return tiles * block_n * kernel.record->head_dim;
}

bool launch_fwd_fp8(const Kernel& kernel, FwdFp8Params& params, int64_t key_rows, int64_t sm_margin, CUstream stream) {
  const Driver& cuda = driver();
  FwdParams& fwd = params.tma.fwd;
  complete(kernel, fwd);
  const CurrentContext current(cuda, kernel.context);
  if (!encode_q_map(cuda, params.tma.q_map, kernel, fwd)) return false;
  if (key_rows == 0) {
    memcpy(params.tma.k_map, params.tma.q_map, sizeof(params.tma.k_map));  // an empty tensor has no map, and needs none
  } else if (!encode_keys_map(cuda, params.tma.k_map, kernel, fwd, fwd.k, fwd.k_stride, fwd.head_dim, key_rows)) {
    return false;
  }
  const unsigned value_tiles = grid_of(kernel, params.blocks_n, fwd.heads_kv, fwd.batch);
  launch(cuda, kernel, 0, value_tiles, 0, &params, stream);
  // Measured on an H200: long sequences gain by the longest tiles of all heads first, short ones by one head at a time.
  constexpr int kManyBlocks = 64;
  params.tma.heads_per_group = fwd.blocks_m >= kManyBlocks ? fwd.batch * fwd.heads : 1;
  params.tma.next_tile = nullptr;  // dealt in rounds
  const unsigned grid = persistent_grid(kernel, fwd, sm_margin);
  if (value_tiles > 0) {
    launch_early(cuda, kernel, 1, grid, kernel.record->smem_bytes, &params, stream);
  } else {
    // Only the thread that loads waits, for flash_transpose_v: rows that see no key are written at once. Without that launch
    // they could be written under whatever kernel came before.
    launch(cuda, kernel, 1, grid, kernel.record->smem_bytes, &params, stream);
  }
  return true;
}

int64_t fp8_rounding_workspace(const Kernel& kernel, Fp8RoundingParams& params) {
  const int64_t head_dim = kernel.record->head_dim;
  const int64_t rotated = head_dim < kFp8RotatedColumns ? head_dim : kFp8RotatedColumns;
  const int64_t rows_at_once = kernel.record->threads / 2 * rotated / head_dim;
  int64_t blocks = 0;
  for (Fp8RoundingTask& task : params.task) {
    task.tiles = static_cast<int>(blocks_of(task.rows, rows_at_once * kFp8RoundingPasses));
    task.first_block = static_cast<int>(blocks);
    blocks += grid_of(kernel, task.tiles, task.heads, params.batch);
    grid_of(kernel, blocks, 1, 1);  // that all of them together are a grid
  }
  // Enough to fill a GPU, few enough to add up in each block that needs the mean. By a sequence's rows alone: its mean has
  // the same bits whatever else is in the batch.
  constexpr int64_t kMostParts = 32;
  const int64_t rows_of_part = kernel.record->threads * int64_t{64} / head_dim;  // what a block has under way at once
  const int64_t parts = blocks_of(params.task[1].rows, rows_of_part);
  const bool smooth = params.task[1].smooth != 0 || params.task[2].smooth != 0;
  params.parts = smooth ? static_cast<int>(parts < kMostParts ? parts : kMostParts) : 0;
  params.scale = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(rotated)));
  return (2 * params.parts * head_dim + 3) * params.batch * params.heads_kv;
}

void launch_fp8_rounding(const Kernel& kernel, const Fp8RoundingParams& params, CUstream stream) {
  const Driver& cuda = driver();
  const Fp8RoundingTask& last = params.task[2];
  const unsigned grid = static_cast<unsigned>(last.first_block) + grid_of(kernel, last.tiles, last.heads, params.batch);
  const CurrentContext current(cuda, kernel.context);
  const int64_t sequences = int64_t{2} * params.batch;  // of k and of v
  const unsigned parts = params.parts > 0 ? grid_of(kernel, params.parts, params.heads_kv, sequences) : 1;
  launch_early(cuda, kernel, 0, parts, 0, &params, stream);
  launch_early(cuda, kernel, 1, grid, 0, &params, stream);
  launch_early(cuda, kernel, 2, grid, 0, &params, stream);
}

void fill_minus_infinity(const Kernel& kernel, float* values, int64_t count, CUstream stream) {
  if (count == 0) return;
  constexpr unsigned kMinusInfinity = 0xff800000;
  const Driver& cuda = driver();
  const CurrentContext current(cuda, kernel.context);
  const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(values);
  check(cuda, cuda.cuMemsetD32Async(address, kMinusInfinity, static_cast<size_t>(count), stream), "filling lse");
}

BwdWorkspace bwd_workspace(const Kernel& kernel, const BwdParams& params, int64_t total_q) {
  const int64_t block_m = kernel.record->block_m;
  const bool packed = params.sequences.cu_seqlens_q != nullptr;
  // Each packed sequence begins a tile of its own, so that the last one of each is partly used.
  const int64_t tiles_of_a_head =
      packed ? total_q / block_m + params.batch : params.batch * blocks_of(params.seqlen_q, block_m);
  // Bounded like a grid, and the tile by the record's check: none of these products overflows.
  const int64_t tiles = grid_of(kernel, tiles_of_a_head, params.heads, 1);
  const int64_t rows = tiles * block_m;
  BwdWorkspace workspace;
  workspace.total_tiles = static_cast<int>(params.heads > 0 ? tiles_of_a_head : 0);
  workspace.dq_accum = 0;
  workspace.lse_log2 = rows * kernel.record->head_dim;
  workspace.delta = workspace.lse_log2 + rows;
  workspace.dq_semaphore = workspace.delta + rows;
  workspace.dq_finished = workspace.dq_semaphore + tiles;
  workspace.next_block = workspace.dq_finished + static_cast<int64_t>(params.batch) * params.heads_kv;
  workspace.total = workspace.next_block + 1;
  return workspace;
}

namespace {

// False where the driver cannot describe one of the tensors.
bool encode_maps(const Driver& cuda, const Kernel& kernel, BwdTmaParams& params, int64_t key_rows) {
  const BwdParams& p = params.bwd;
  const int64_t query_rows = p.lse_head_stride;
  if (query_rows == 0 || key_rows == 0) return false;  // an empty tensor has no map
  const int64_t batch_q = p.sequences.cu_seqlens_q != nullptr ? 1 : p.batch;
  const int64_t batch_k = p.sequences.cu_seqlens_k != nullptr ? 1 : p.batch;
  const auto query_map = [&](unsigned char* map, const void* data, const Strides& stride, int64_t head_dim) {
    return encode_map(cuda, map, kernel, data, stride, head_dim, query_rows, p.heads, batch_q, kernel.record->block_m);
  };
  const auto key_map = [&](unsigned char* map, const void* data, const Strides& stride, int64_t head_dim) {
    return encode_map(cuda, map, kernel, data, stride, head_dim, key_rows, p.heads_kv, batch_k, kernel.record->block_n);
  };
  return query_map(params.q_map, p.q, p.q_stride, p.head_dim) &&
         query_map(params.dout_map, p.dout, p.dout_stride, p.head_dim_v) &&
         key_map(params.k_map, p.k, p.k_stride, p.head_dim) && key_map(params.v_map, p.v, p.v_stride, p.head_dim_v);
}

}  // namespace

bool launch_bwd(const Kernel& kernel, BwdParams& params, const BwdWorkspace& workspace, float* buffer, int64_t key_rows,
                CUstream stream) {
  const Driver& cuda = driver();
  complete(kernel, params);
  params.blocks_n = static_cast<int>(blocks_of(params.seqlen_k, kernel.record->block_n));
  params.total_tiles = workspace.total_tiles;
  params.dq_accum = buffer + workspace.dq_accum;
  params.lse_log2 = buffer + workspace.lse_log2;
  params.delta = buffer + workspace.delta;
  params.dq_semaphore = reinterpret_cast<int*>(buffer + workspace.dq_semaphore);
  params.dq_finished = reinterpret_cast<int*>(buffer + workspace.dq_finished);
  params.next_block = reinterpret_cast<int*>(buffer + workspace.next_block);
  const unsigned query_tiles = grid_of(kernel, params.blocks_m, params.heads, params.batch);
  const int64_t blocks_of_a_key_tile = kernel.record->split ? 2 : 1;
  const unsigned key_blocks = grid_of(kernel, blocks_of_a_key_tile * params.blocks_n, params.heads_kv, params.batch);
  const CurrentContext current(cuda, kernel.context);
  BwdTmaParams with_maps;
  if (kernel.tensor_maps) {
    with_maps.bwd = params;
    if (!encode_maps(cuda, kernel, with_maps, key_rows)) return false;
  }
  launch(cuda, kernel, 0, query_tiles, 0, &params, stream);
  // A launch may be early only where all three are there: each waits for the one before it alone.
  const bool early = kernel.tensor_maps && query_tiles > 0 && key_blocks > 0;
  const auto launch_next = [&](int entry, unsigned grid, unsigned shared_bytes, auto* its_params) {
    if (early) return launch_early(cuda, kernel, entry, grid, shared_bytes, its_params, stream);
    launch(cuda, kernel, entry, grid, shared_bytes, its_params, stream);
  };
  if (kernel.tensor_maps) {
    // Deterministic, key blocks wait for those before them, which have to be running: as thread blocks, they begin in order.
    const bool persistent = early && bwd_is_persistent(kernel.record->head_dim) && !params.deterministic;
    const unsigned multiprocessors = static_cast<unsigned>(kernel.multiprocessors);
    const unsigned grid = persistent && multiprocessors < key_blocks ? multiprocessors : key_blocks;
    launch_next(1, grid, kernel.record->smem_bytes, &with_maps);
  } else {
    launch_next(1, key_blocks, kernel.record->smem_bytes, &params);
  }
  launch_next(2, query_tiles, 0, &params);
  return true;
}

Divisor divisor(unsigned d) {
  Divisor result = {0, 31};
  if (d == 0) return result;
  while (uint64_t{1} << (result.shift - 31) < d) ++result.shift;
  result.multiplier = static_cast<unsigned>(((uint64_t{1} << result.shift) + d - 1) / d);
  return result;
}

Preference decode_preference(const DecodeParams& params) {
  const int64_t group = params.heads_kv > 0 ? params.heads / params.heads_kv : 1;
  return group * params.seqlen_q > kWarpRows ? Preference::throughput : Preference::every_feature;
}

int decode_splits(const Kernel& kernel, DecodeParams& params, int64_t asked) {
  const int warps = static_cast<int>(kernel.record->threads / 32);
  const int unit_warps = static_cast<int>(kernel.record->block_m / kWarpRows);
  params.group = params.heads_kv > 0 ? params.heads / params.heads_kv : 1;
  const int64_t rows = static_cast<int64_t>(params.group) * params.seqlen_q;
  const int64_t warp_tiles = blocks_of(rows, kWarpRows);
  params.row_warps = unit_warps;
  while (params.row_warps < warp_tiles && 2 * params.row_warps <= warps) params.row_warps *= 2;
  params.row_tiles = static_cast<int>(blocks_of(warp_tiles, params.row_warps));
  constexpr int64_t kMostSplits = 128;
  constexpr int64_t kSmallestPart = 64;  // keys
  const int64_t parts = blocks_of(params.seqlen_k, kSmallestPart);
  if (asked > 0) return static_cast<int>(asked < kMostSplits ? asked : kMostSplits);
  const int64_t multiprocessors = kernel.multiprocessors;
  const int64_t tiles = static_cast<int64_t>(params.batch) * params.heads_kv * params.row_tiles;
  if (tiles == 0) return 1;
  // The fewest splits with the shortest time, in steps: a unit takes block_n keys in one, a wave of blocks costs the time
  // of kWave besides its own, and joining the splits that of kCombine. Blocks of few rows, or of one unit's, wait for
  // memory, which half of the multiprocessors keep busy: more waves than one only slow them. (Measured on an H200.)
  constexpr int64_t kWave = 8, kCombine = 4;
  const int64_t steps = blocks_of(params.seqlen_k, warps / unit_warps * kernel.record->block_n);
  int64_t most = parts < kMostSplits ? parts : kMostSplits;
  const bool waits = params.row_warps <= 2 || params.row_warps == unit_warps;
  if (waits && multiprocessors / tiles < most) most = multiprocessors / tiles;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t cost = blocks_of(tiles * splits, multiprocessors) * (blocks_of(steps, splits) + kWave) +
                         (splits > 1 ? kCombine : 0);
    if (cost >= least) continue;
    least = cost;
    best = splits;
  }
  return static_cast<int>(best);
}

namespace {

// Blocks' worth of time that `blocks` take: half of the places keep memory busy, so that a last wave costs as much as these.
int64_t wave_cost(int64_t blocks, int64_t places) {
  const int64_t rest = blocks % places;
  return blocks - rest + (rest == 0 || 2 * rest > places ? rest : places / 2);
}

// Of more blocks than fit at once: with half of the warps each, two fit on a multiprocessor. They do better where fewer
// multiprocessors have nothing to do at the end, or all fit at once, so that none waits for another to begin and to end.
// (Measured on an H200.)
int warps_of_blocks(const Kernel& kernel, const DecodeParams& params, int64_t blocks) {
  const int64_t multiprocessors = kernel.multiprocessors;
  const int warps = static_cast<int>(kernel.record->threads / 32);
  if (blocks <= multiprocessors || !kernel.halves || params.row_warps > warps / 2) return warps;
  const int64_t cost = wave_cost(blocks, multiprocessors), cost_of_halves = wave_cost(blocks, 2 * multiprocessors);
  return cost_of_halves < cost || (cost_of_halves == cost && blocks <= 2 * multiprocessors) ? warps / 2 : warps;
}

}  // namespace

void launch_decode(const Kernel& kernel, DecodeParams& params, CUstream stream) {
  const Driver& cuda = driver();
  constexpr double kLog2E = 1.4426950408889634;
  params.scale_log2 = static_cast<float>(params.scale * kLog2E);
  params.by_group = divisor(static_cast<unsigned>(params.group));
  params.by_heads_kv = divisor(static_cast<unsigned>(params.heads_kv));
  params.by_row_tiles = divisor(static_cast<unsigned>(params.row_tiles));
  params.by_splits = divisor(static_cast<unsigned>(params.splits));
  const int64_t blocks = static_cast<int64_t>(params.row_tiles) * params.splits;
  const unsigned grid = grid_of(kernel, blocks, params.heads_kv, params.batch);
  params.warps = warps_of_blocks(kernel, params, grid);
  const CurrentContext current(cuda, kernel.context);
  const unsigned threads = static_cast<unsigned>(params.warps) * 32;
  const unsigned shared_bytes = kernel.record->smem_bytes / (kernel.record->threads / threads);
  launch_early(cuda, kernel, 0, grid, shared_bytes, &params, stream, threads);
  if (params.splits == 1) return;
  const unsigned rows = grid_of(kernel, params.lse_count, 1, 1);
  launch_early(cuda, kernel, 1, static_cast<unsigned>(blocks_of(rows, kCombineThreads / 32)), 0, &params, stream);
}

void launch_rotary(const Kernel& kernel, const RotaryParams& params, CUstream stream) {
  const Driver& cuda = driver();
  unsigned most = 0;
  for (int i = 0; i < params.tasks; ++i) {
    const RotaryTask& task = params.task[i];
    const int64_t chunks = static_cast<int64_t>(task.seqlen) * (task.head_dim / kHeadDimStep);
    const int64_t blocks = blocks_of(chunks * task.heads * params.batch, kernel.record->threads);
    const unsigned grid = grid_of(kernel, blocks, 1, 1);
    if (grid > most) most = grid;
  }
  const CurrentContext current(cuda, kernel.context);
  launch(cuda, kernel, 0, most, 0, &params, stream, static_cast<unsigned>(params.tasks));
}

}  // namespace flash_attn
