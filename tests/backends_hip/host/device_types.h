// Types and functions that lowered tilelang programs use, for the CPU (emulated) and for clang's AMDGPU target.
// Only what our own programs need is here; anything else does not compile, which is how it is noticed.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef __INT64_TYPE__ int64_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT32_TYPE__ int32_t;

#ifdef __AMDGCN__
#define ON_DEVICE __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define HUGE_VALF __builtin_huge_valf()
#define exp2f __builtin_exp2f
#define __log2f __builtin_log2f
#define __expf __builtin_expf
#define sqrtf __builtin_sqrtf
struct thread_index { ON_DEVICE operator int() const { return __builtin_amdgcn_workitem_id_x(); } };
struct block_x { ON_DEVICE operator int() const { return __builtin_amdgcn_workgroup_id_x(); } };
struct block_y { ON_DEVICE operator int() const { return __builtin_amdgcn_workgroup_id_y(); } };
struct block_z { ON_DEVICE operator int() const { return __builtin_amdgcn_workgroup_id_z(); } };
static __attribute__((device)) struct { thread_index x; } threadIdx;
static __attribute__((device)) struct { block_x x; block_y y; block_z z; } blockIdx;
#else
#define ON_DEVICE
#include <cmath>
#include <cstring>
#define __global__
#define __launch_bounds__(...)
#define __log2f log2f
#define __expf expf
#endif

template <class T> ON_DEVICE inline T max(T a, T b) { return a > b ? a : b; }
template <class T> ON_DEVICE inline T min(T a, T b) { return a < b ? a : b; }

template <class To, class From> ON_DEVICE inline To bits_as(From value) { return __builtin_bit_cast(To, value); }

struct bfloat16_t {
  ushort bits;
  ON_DEVICE bfloat16_t() {}
  ON_DEVICE bfloat16_t(float value) {  // to the nearest, ties to even; NaN stays NaN
    const uint wide = bits_as<uint>(value);
    const bool is_nan = (wide & 0x7fffffff) > 0x7f800000;
    bits = is_nan ? (wide >> 16) | 0x40 : (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
  }
  ON_DEVICE operator float() const { return bits_as<float>(uint(bits) << 16); }
};

#ifdef __AMDGCN__
using half_t = _Float16;
#else
struct half_t {  // read only
  ushort bits;
  operator float() const {
    const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
    const float size = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
    return bits >> 15 ? -size : size;
  }
};
#endif

struct fp8_e4_t {
  uchar bits;
  ON_DEVICE fp8_e4_t() {}
  ON_DEVICE explicit fp8_e4_t(float) : bits(0) {}  // programs make only zeros of numbers
};

template <class T, int N> struct alignas(sizeof(T) * N) pack { T lane[N]; };
using fp8_e4_8_t = pack<fp8_e4_t, 8>;
using fp8_e4_16_t = pack<fp8_e4_t, 16>;
template <class... L> ON_DEVICE inline fp8_e4_8_t make_fp8_e4_8_t(L... lanes) { return {{lanes...}}; }
template <class... L> ON_DEVICE inline fp8_e4_16_t make_fp8_e4_16_t(L... lanes) { return {{lanes...}}; }

#define VECTORS(T)                                                                                     \
  struct T##1 { T x; };                                                                                \
  struct alignas(2 * sizeof(T)) T##2 { T x, y; };                                                      \
  struct alignas(4 * sizeof(T)) T##4 { T x, y, z, w; };                                                \
  ON_DEVICE inline T##2 make_##T##2(T x, T y) { return {x, y}; }                                       \
  ON_DEVICE inline T##4 make_##T##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float)
VECTORS(uint)
VECTORS(ushort)
struct bfloat16x2 { bfloat16_t x, y; };
struct half2 { half_t x, y; };
ON_DEVICE inline uint __pack_bfloat162(bfloat16_t low, bfloat16_t high) { return low.bits | uint(high.bits) << 16; }

using float32x4 = float __attribute__((vector_size(16)));
using bfloat16x4_vec = short __attribute__((vector_size(8)));

#ifdef __AMDGCN__
ON_DEVICE inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
ON_DEVICE inline int lanes_of_a_wave() { return __builtin_amdgcn_wavefrontsize(); }
ON_DEVICE inline float shuffle_xor(float value, int mask) {
  const int lane = __builtin_amdgcn_mbcnt_hi(-1, __builtin_amdgcn_mbcnt_lo(-1, 0));
  return bits_as<float>(__builtin_amdgcn_ds_bpermute((lane ^ mask) * 4, bits_as<int>(value)));
}
#else
#include "waves.h"
#endif

namespace tl {
struct SumOp { template <class T> ON_DEVICE T operator()(T a, T b) const { return a + b; } };
struct MaxOp { template <class T> ON_DEVICE T operator()(T a, T b) const { return max(a, b); } };

// Halves the distance until `scale`: through shared memory between waves, by lane exchange within one.
template <class Operation, int threads, int scale, int first = 0> struct AllReduce {
  static ON_DEVICE float run(float value, float* shared = nullptr) {
    constexpr int distance = threads / 2;
    if (distance >= lanes_of_a_wave()) {
      __syncthreads();
      shared[threadIdx.x] = value;
      __syncthreads();
      value = Operation()(value, shared[threadIdx.x ^ distance]);
    } else {
      value = Operation()(value, shuffle_xor(value, distance));
    }
    if constexpr (distance == scale) return value;
    else return AllReduce<Operation, distance, scale, first>::run(value, shared);
  }
};
}  // namespace tl
