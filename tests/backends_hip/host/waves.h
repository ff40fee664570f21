// Threads of one block as fibers of one CPU thread, in waves of 64 lanes. A wave goes on when all of its lanes have
// reached an exchange, a block when all of its threads have reached a barrier; anything else is a deadlock and said so.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>
#include <vector>

struct index3 { int x, y, z; };
static index3 threadIdx, blockIdx;
static uchar* shared_memory;
static bool codes_are_fnuz;

namespace waves {
constexpr int LANES = 64;
enum State { RUNS, AT_BARRIER, AT_EXCHANGE, ENDED };
struct Fiber {
  ucontext_t context;
  State state = RUNS;
  float left[8], right[8];  // what this lane shows to its wave
  std::vector<char> stack = std::vector<char>(1 << 17);
};
static std::vector<std::unique_ptr<Fiber>> fibers;
static ucontext_t scheduler;
static int current;
static void (*program)();

inline void pause(State state) {
  const int self = current;
  fibers[self]->state = state;
  swapcontext(&fibers[self]->context, &scheduler);
  current = threadIdx.x = self;
}
inline void body() {
  program();
  pause(ENDED);
}
inline Fiber& lane_of_wave(int lane) { return *fibers[current / LANES * LANES + lane]; }

// Lets whatever waits for nothing more run; false when nothing does.
inline bool release() {
  const int threads = fibers.size();
  bool released = false, all_at_barrier = true;
  for (int wave = 0; wave < threads; wave += LANES) {
    int live = 0, exchanging = 0;
    for (int t = wave; t < min(threads, wave + LANES); ++t) {
      live += fibers[t]->state != ENDED;
      exchanging += fibers[t]->state == AT_EXCHANGE;
      all_at_barrier &= fibers[t]->state == AT_BARRIER || fibers[t]->state == ENDED;
    }
    if (live && live == exchanging) {
      for (int t = wave; t < min(threads, wave + LANES); ++t)
        if (fibers[t]->state == AT_EXCHANGE) fibers[t]->state = RUNS;
      released = true;
    }
  }
  if (released || !all_at_barrier) return released;
  for (auto& fiber : fibers)
    if (fiber->state == AT_BARRIER) fiber->state = RUNS, released = true;
  return released;
}

inline void run_block() {
  for (auto& fiber : fibers) {
    getcontext(&fiber->context);
    fiber->context.uc_stack = {fiber->stack.data(), 0, fiber->stack.size()};
    fiber->context.uc_link = &scheduler;
    makecontext(&fiber->context, body, 0);
    fiber->state = RUNS;
  }
  do {
    for (size_t t = 0; t < fibers.size(); ++t)
      if (fibers[t]->state == RUNS) {
        current = threadIdx.x = t;
        swapcontext(&scheduler, &fibers[t]->context);
      }
  } while (release());
  for (auto& fiber : fibers)
    if (fiber->state != ENDED) fprintf(stderr, "threads of a block wait for each other\n"), abort();
}

inline void launch(void (*kernel)(), int threads, index3 grid) {
  program = kernel;
  fibers.clear();
  for (int t = 0; t < threads; ++t) fibers.push_back(std::make_unique<Fiber>());
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y)
      for (int x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        run_block();
      }
}
}  // namespace waves

inline void __syncthreads() { waves::pause(waves::AT_BARRIER); }
inline int lanes_of_a_wave() { return waves::LANES; }
inline float shuffle_xor(float value, int mask) {
  waves::fibers[waves::current]->left[0] = value;
  waves::pause(waves::AT_EXCHANGE);
  const float other = waves::lane_of_wave(waves::current % waves::LANES ^ mask).left[0];
  waves::pause(waves::AT_EXCHANGE);
  return other;
}

// D = A * B + C of 16 x 16 x (4 * K): lane l holds K numbers of row (column) l % 16 from k = l / 16 * K on; of D it holds
// column l % 16, rows 4 * (l / 16) to 4 * (l / 16) + 3.
template <int K> inline float32x4 multiply_in_wave(const float* a, const float* b, float32x4 c) {
  waves::Fiber& own = *waves::fibers[waves::current];
  for (int i = 0; i < K; ++i) own.left[i] = a[i], own.right[i] = b[i];
  waves::pause(waves::AT_EXCHANGE);
  const int lane = waves::current % waves::LANES;
  for (int r = 0; r < 4; ++r) {
    float sum = 0;
    for (int chunk = 0; chunk < 4; ++chunk)
      for (int i = 0; i < K; ++i)
        sum += waves::lane_of_wave(16 * chunk + 4 * (lane / 16) + r).left[i] *
               waves::lane_of_wave(16 * chunk + lane % 16).right[i];
    c[r] += sum;
  }
  waves::pause(waves::AT_EXCHANGE);
  return c;
}
inline float e4m3(uchar code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7, bias = codes_are_fnuz ? 8 : 7;
  if (codes_are_fnuz ? code == 0x80 : (code & 0x7f) == 0x7f) return NAN;
  const float size = exponent ? ldexpf(8 + mantissa, exponent - bias - 3) : ldexpf(mantissa, -bias - 2);
  return code >> 7 ? -size : size;
}
inline float32x4 __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
    bfloat16x4_vec a, bfloat16x4_vec b, float32x4 c, int, int, int) {
  float left[4], right[4];
  for (int i = 0; i < 4; ++i) {
    left[i] = bits_as<float>(uint(ushort(a[i])) << 16);
    right[i] = bits_as<float>(uint(ushort(b[i])) << 16);
  }
  return multiply_in_wave<4>(left, right, c);
}
inline float32x4 __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(long a, long b, float32x4 c, int, int, int) {
  float left[8], right[8];
  for (int i = 0; i < 8; ++i) left[i] = e4m3(a >> 8 * i), right[i] = e4m3(b >> 8 * i);
  return multiply_in_wave<8>(left, right, c);
}
