// What Hopper adds, as thin wrappers: mbarriers, bulk tensor copies, warpgroup matrix products, register reallocation.
// Section numbers refer to the PTX ISA manual, version 8.8. sm_90a only.
#pragma once

namespace hopper {

// 9.7.13.15 mbarrier. A barrier is 8 bytes of shared memory; its phase bit flips each time all expected arrivals, and the
// bytes announced to it, are in.
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect_bytes(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase with this parity has completed.
__device__ __forceinline__ void barrier_wait(unsigned barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A place in a ring of kSize buffers, and the parity of the phases of its barriers.
template <int kSize>
struct Ring {
  int stage = 0;
  int phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kSize) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// 9.7.9.25.5.2 cp.async.bulk.tensor: a box of a (B, H, S, D) tensor map to shared memory, zeros where it leaves the tensor.
__device__ __forceinline__ void load_box(unsigned dst, const void* tensor_map, unsigned barrier, int column, int row,
                                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
          "r"(dst),
      "l"(tensor_map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

// 9.7.9.25.4.1 cp.async.bulk: consecutive bytes to shared memory; addresses and size are multiples of 16.
__device__ __forceinline__ void load_bytes(unsigned dst, const void* src, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(barrier)
               : "memory");
}

// 9.7.9.25.4.2 cp.reduce.async.bulk: adds consecutive floats of shared memory to device memory.
__device__ __forceinline__ void add_floats(float* dst, unsigned src, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}

// Waits until what this thread's add_floats read in shared memory, but for the last kPending, may be overwritten; and until
// their sums are written.
template <int kPending>
__device__ __forceinline__ void wait_for_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_for_sums() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_map(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

// 9.7.19.5 setmaxnreg: gives registers of this warpgroup back, or takes more.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// 9.7.13.1 barrier: named barriers among some of the warps. Not ptx::named_sync, whose `.aligned` form ptxas compiles to
// other code around it.
__device__ __forceinline__ void named_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// 9.7.13.4 fence: ordinary stores to shared memory before it are seen by the copy engine and by wgmma after it; and what the
// copy engine writes after it is not seen by ordinary loads before it.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same of device memory: what this thread knows to be written, by a lock or by the end of a grid, its copies see.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// 9.7.15 wgmma. fence before the first product of a batch whenever registers it uses were written; commit closes a group.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that registers which a product still writes are not to be read or moved before this point.
template <int kCount>
__device__ __forceinline__ void hold(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// 9.7.15.5.1.2.2 matrix descriptors of tiles in 64-column panels with the 128-byte swizzle, rows of 128 bytes.
// K-major (the product runs along columns): 8-row groups are 1,024 bytes apart, one panel holds four steps of 16.
__device__ __forceinline__ unsigned long long descriptor_k_major(unsigned address) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// MN-major (the product runs along rows): columns beyond 64 are `panel_bytes` further.
__device__ __forceinline__ unsigned long long descriptor_mn_major(unsigned address, unsigned panel_bytes) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(panel_bytes >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// The same K-major tile with rows of 64 bytes in the 64-byte swizzle: 8-row groups are 512 bytes apart.
__device__ __forceinline__ unsigned long long descriptor_k_major_64(unsigned address) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | 1ull << 16 | 32ull << 32 | 2ull << 62;
}

// K-major without a swizzle, as core matrices of 8 rows by 16 bytes, 128 bytes each: the two of a product's step lie side by
// side, those of the next 8 rows follow.
__device__ __forceinline__ unsigned long long descriptor_core_matrices(unsigned address) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) | 8ull << 16 | 16ull << 32;
}

// The descriptor of what lies `bytes` further. Addresses are below 2^18: nothing is carried out of their field, and one addition
// to the low word will do.
__device__ __forceinline__ unsigned long long descriptor_after(unsigned long long descriptor, unsigned bytes) {
  const unsigned low = static_cast<unsigned>(descriptor) + (bytes >> 4);
  return descriptor >> 32 << 32 | low;
}

// The operand lists of wgmma: the accumulator's registers in eights.
#define FA_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FA_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FA_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FA_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FA_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FA_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FA_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FA_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FA_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FA_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FA_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FA_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FA_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FA_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FA_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FA_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FA_L2 FA_R0 ", " FA_R1
#define FA_L4 FA_R0 ", " FA_R1 ", " FA_R2 ", " FA_R3
#define FA_L5 FA_L4 ", " FA_R4
#define FA_L6 FA_L5 ", " FA_R5
#define FA_L7 FA_L6 ", " FA_R6
#define FA_L8 FA_L7 ", " FA_R7
#define FA_L9 FA_L8 ", " FA_R8
#define FA_L10 FA_L9 ", " FA_R9
#define FA_L11 FA_L10 ", " FA_R10
#define FA_L12 FA_L11 ", " FA_R11
#define FA_L14 FA_L12 ", " FA_R12 ", " FA_R13
#define FA_L16 FA_L14 ", " FA_R14 ", " FA_R15
#define FA_F8(i)                                                                                                       \
  "+f"(d[8 * i]), "+f"(d[8 * i + 1]), "+f"(d[8 * i + 2]), "+f"(d[8 * i + 3]), "+f"(d[8 * i + 4]), "+f"(d[8 * i + 5]),  \
      "+f"(d[8 * i + 6]), "+f"(d[8 * i + 7])
#define FA_D2 FA_F8(0), FA_F8(1)
#define FA_D4 FA_F8(0), FA_F8(1), FA_F8(2), FA_F8(3)
#define FA_D5 FA_D4, FA_F8(4)
#define FA_D6 FA_D5, FA_F8(5)
#define FA_D7 FA_D6, FA_F8(6)
#define FA_D8 FA_D7, FA_F8(7)
#define FA_D9 FA_D8, FA_F8(8)
#define FA_D10 FA_D9, FA_F8(9)
#define FA_D11 FA_D10, FA_F8(10)
#define FA_D12 FA_D11, FA_F8(11)
#define FA_D14 FA_D12, FA_F8(12), FA_F8(13)
#define FA_D16 FA_D14, FA_F8(14), FA_F8(15)

// Products of 64 x N x 16. `shared`: d = a b (+ d), both from tiles in shared memory, K-major unless said to be MN-major.
// `registers`: d += a b, a as an mma.sync A operand of each warp's 16 rows, b an MN-major tile.
template <bool kBf16, int kN>
struct Wgmma;

#define FA_WGMMA(TYPE, IS_BF16, N, EIGHTS, X0, X1, X2, X3, X4)                                                        \
  template <>                                                                                                          \
  struct Wgmma<IS_BF16, N> {                                                                                           \
    template <int kMajorMA = 0, int kMajorNB = 0>                                                                      \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b,       \
                                                  int accumulate) {                                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_L##EIGHTS "}, " X0 ", " X1  \
                   ", p, 1, 1, " X3 ", " X4 ";\n}"                                                                     \
                   : FA_D##EIGHTS                                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorMA), "n"(kMajorNB));                                   \
    }                                                                                                                  \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const unsigned (&a)[4],                        \
                                                     unsigned long long b) {                                           \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_L##EIGHTS "}, {" X0 ", "   \
                   X1 ", " X2 ", " X3 "}, " X4 ", 1, 1, 1, 1;"                                                         \
                   : FA_D##EIGHTS                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                              \
    }                                                                                                                  \
  };
#define FA_WGMMA_BOTH(N, EIGHTS, X0, X1, X2, X3, X4)                                                                  \
  FA_WGMMA("bf16", true, N, EIGHTS, X0, X1, X2, X3, X4)                                                               \
  FA_WGMMA("f16", false, N, EIGHTS, X0, X1, X2, X3, X4)

FA_WGMMA_BOTH(32, 2, "%16", "%17", "%18", "%19", "%20")
FA_WGMMA_BOTH(64, 4, "%32", "%33", "%34", "%35", "%36")
FA_WGMMA_BOTH(80, 5, "%40", "%41", "%42", "%43", "%44")
FA_WGMMA_BOTH(96, 6, "%48", "%49", "%50", "%51", "%52")
FA_WGMMA_BOTH(112, 7, "%56", "%57", "%58", "%59", "%60")
FA_WGMMA_BOTH(128, 8, "%64", "%65", "%66", "%67", "%68")
FA_WGMMA_BOTH(144, 9, "%72", "%73", "%74", "%75", "%76")
FA_WGMMA_BOTH(160, 10, "%80", "%81", "%82", "%83", "%84")
FA_WGMMA_BOTH(176, 11, "%88", "%89", "%90", "%91", "%92")
FA_WGMMA_BOTH(192, 12, "%96", "%97", "%98", "%99", "%100")
FA_WGMMA_BOTH(256, 16, "%128", "%129", "%130", "%131", "%132")

// Products of 64 x N x 32 of e4m3, fp32 accumulators of 14 significant bits: sums of many products are to be added up
// elsewhere. b is K-major, a a K-major tile or, in registers, 16 rows a warp: a lane has bytes 4 (l % 4) to + 3 of rows l / 4
// and l / 4 + 8, then the same 16 bytes further.
template <int kN>
struct WgmmaE4m3;

#define FA_WGMMA_E4M3(N, EIGHTS, X0, X1, X2, X3, X4, X5)                                                              \
  template <>                                                                                                          \
  struct WgmmaE4m3<N> {                                                                                                \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b,       \
                                                  int accumulate) {                                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n"                                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FA_L##EIGHTS "}, " X0 ", " X1          \
                   ", p, 1, 1;\n}"                                                                                     \
                   : FA_D##EIGHTS                                                                                      \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                 \
    }                                                                                                                  \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,  \
                                                     int accumulate) {                                                 \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n"                                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FA_L##EIGHTS "}, {" X0 ", " X1 ", " X2 \
                   ", " X3 "}, " X4 ", p, 1, 1;\n}"                                                                    \
                   : FA_D##EIGHTS                                                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                             \
    }                                                                                                                  \
  };

FA_WGMMA_E4M3(64, 4, "%32", "%33", "%34", "%35", "%36", "%37")
FA_WGMMA_E4M3(96, 6, "%48", "%49", "%50", "%51", "%52", "%53")
FA_WGMMA_E4M3(128, 8, "%64", "%65", "%66", "%67", "%68", "%69")
FA_WGMMA_E4M3(160, 10, "%80", "%81", "%82", "%83", "%84", "%85")
FA_WGMMA_E4M3(192, 12, "%96", "%97", "%98", "%99", "%100", "%101")
FA_WGMMA_E4M3(224, 14, "%112", "%113", "%114", "%115", "%116", "%117")
FA_WGMMA_E4M3(256, 16, "%128", "%129", "%130", "%131", "%132", "%133")

}  // namespace hopper
