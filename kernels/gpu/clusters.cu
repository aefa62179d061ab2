// One output tile per block, y = x W^T, for Hopper: blocks of a cluster share what they read and add up what they made.
//
// WG      warp groups that multiply, each 64 rows of the tile's tall side: of the weights, or of the tokens if SWAPPED
// ROWS, TOKENS       of a tile. TOKENS_IN_CLUSTER blocks of a cluster have other tokens and the same weights,
// ROWS_IN_CLUSTER    have other weights and the same tokens,
// SPLITS             have the same tile, each a stretch of the inputs
// STAGES  buffers of 64 inputs
// WIDTH   rows of the other side that one instruction takes
// REGISTERS  0, or how many a worker takes over from a warp group that only loads
// GATED   1: rows come as eight of the gate and eight of what it lets through in turn; the output is silu(gate) * up
// SCALES  1: x is normed but for the factor of each token, which its squares give; the sums are multiplied by it
// ADDS    1: the output is added to a residual; written are the sum, the sum times a norm's weights, and the sum's squares
//         added up for each token and each stretch of columns
//
// `multiply` in front of this text: d[WIDTH / 2] += 64 x 16 of shared memory times 16 x WIDTH of shared memory.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap {
  char opaque[128];
};

// The norm behind a product that ADDS, or before one that SCALES.
struct Norm {
  const u16* residual;
  const u16* weights;
  u16* weighted;
  float* squares;  // of each token `pitch` numbers, of which `stretches` are used
  int stretches, pitch;
  float share, eps;  // of one column in the mean of the squares
};

constexpr int CLUSTER = TOKENS_IN_CLUSTER * ROWS_IN_CLUSTER * SPLITS;
constexpr int READERS = TOKENS_IN_CLUSTER + ROWS_IN_CLUSTER - 1;
constexpr int W_BYTES = ROWS * 128;
constexpr int X_BYTES = TOKENS * 128;
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int WORKERS = WG * 128;
constexpr int SCALERS = SCALES ? REGISTERS ? 96 : 32 : 0;  // threads that find the tokens' factors meanwhile
constexpr int THREADS = WORKERS + (REGISTERS ? 128 : 32 + SCALERS);
constexpr int SIDE = SWAPPED ? ROWS : TOKENS;
constexpr int SUMS = SIDE / 2;
constexpr int PORTION = TOKENS / SPLITS;
constexpr int W_FIRST = (ROWS / 8 + TOKENS_IN_CLUSTER - 1) / TOKENS_IN_CLUSTER * 8;  // rows that each loads but the last
constexpr int COLUMNS = GATED ? 32 : 64;  // of the output, by one warp group
static_assert(!(ADDS && (GATED || SCALES)), "a product stands before a norm or behind one");

#if ADDS
// Of a product that ADDS: a thread has HELD times eight columns of one token, and so has each of LANES threads side by side.
constexpr int LANES = SWAPPED ? 2 * SPLITS : 8;
constexpr int HELD = SWAPPED ? (ROWS / 8 + LANES - 1) / LANES : PORTION / 16;
constexpr int AN_EQUAL_SHARE = 65536 / ((THREADS + 127) / 128 * 128);  // registers are given out to four warps
constexpr int OWN_REGISTERS = REGISTERS ? REGISTERS : AN_EQUAL_SHARE < 255 ? AN_EQUAL_SHARE : 255;
// What is added is read while the product still runs, where there are registers to hold it.
constexpr bool EARLY = SUMS + 4 * HELD + (SWAPPED ? 4 * HELD : 4) + 48 <= OWN_REGISTERS;
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ u32 remote_address(u32 address, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_publish() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

__device__ __forceinline__ void workers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

__device__ __forceinline__ void load_weights(u32 place, const TensorMap* map, u32 barrier, int input, int row, u16 mask) {
  const u64 once = 0x12F0000000000000ull;  // evict first: the next reader of these weights is the next step
#if GATED
  const int eights = row / 16;
#if TOKENS_IN_CLUSTER > 1
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4, %4, %5}], [%2], %6, %7;" ::"r"(place), "l"(map), "r"(barrier), "r"(input), "r"(0),
      "r"(eights), "h"(mask), "l"(once) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %4, %5}], [%2], %6;" ::"r"(place), "l"(map), "r"(barrier), "r"(input), "r"(0),
      "r"(eights), "l"(once) : "memory");
#endif
#else
#if TOKENS_IN_CLUSTER > 1
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(place), "l"(map), "r"(barrier), "r"(input), "r"(row), "h"(mask),
      "l"(once) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(place), "l"(map), "r"(barrier), "r"(input), "r"(row), "l"(once)
      : "memory");
#endif
#endif
}

__device__ __forceinline__ void load_tokens(u32 place, const TensorMap* map, u32 barrier, int input, int token, u16 mask) {
  const u64 often = 0x14F0000000000000ull;  // evict last: every row of blocks reads them
#if ROWS_IN_CLUSTER > 1
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5, %6;" ::"r"(place), "l"(map), "r"(barrier), "r"(input), "r"(token), "h"(mask),
      "l"(often) : "memory");
#else
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(place), "l"(map), "r"(barrier), "r"(input), "r"(token), "l"(often)
      : "memory");
#endif
}

__device__ __forceinline__ void expect(u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(STAGE_BYTES) : "memory");
}

// A tile of rows of 128 bytes, swizzled by 128 bytes, eight rows each 1,024 bytes.
__device__ __forceinline__ u64 describe(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ u32 pack(float first, float second) {
  u32 both;
#if HALF
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
  return both;
}

__device__ __forceinline__ float widen(u16 narrow) {
#if HALF
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(narrow));
  return wide;
#else
  return __uint_as_float((u32)narrow << 16);
#endif
}

__device__ __forceinline__ uint4 read(const void* place) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(place));
  return v;
}

// Two columns: add, round, weigh; return the squares of the sums.
__device__ __forceinline__ float add_two(u32& value, u32& weighted, u32 added, u32 weights) {
  value = pack(widen(value) + widen(added), widen(value >> 16) + widen(added >> 16));
  const float first = widen(value), second = widen(value >> 16);
  weighted = pack(first * widen(weights), second * widen(weights >> 16));
  return first * first + second * second;
}

// Eight columns of one token.
__device__ __forceinline__ float add_eight(uint4 value, uint4 added, uint4 weights, u16* total, u16* weighted) {
  uint4 w;
  float squares = add_two(value.x, w.x, added.x, weights.x);
  squares += add_two(value.y, w.y, added.y, weights.y);
  squares += add_two(value.z, w.z, added.z, weights.z);
  squares += add_two(value.w, w.w, added.w, weights.w);
  *(uint4*)total = value;
  *(uint4*)weighted = w;
  return squares;
}

__device__ __forceinline__ float gate(float value, float up) { return __fdividef(value, 1.0f + __expf(-value)) * up; }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    product(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap w_last_map,
            const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap out_map, u16* out_pointer,
            const u16* bias, int tokens, int columns, int token_groups, int steps, const Norm norm) {
  extern __shared__ char dynamic[];
  __shared__ u64 filled[STAGES], emptied[STAGES];
#if SCALES
  __shared__ float2 factors[TOKENS / 2];
#endif

  const u32 base = (shared_address(dynamic) + 1023) & ~1023u;
  const u32 full = shared_address(filled), empty = shared_address(emptied);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % CLUSTER, group = blockIdx.x / CLUSTER;
  const int ct = rank % TOKENS_IN_CLUSTER, cr = rank / TOKENS_IN_CLUSTER % ROWS_IN_CLUSTER;
  const int cs = rank / (TOKENS_IN_CLUSTER * ROWS_IN_CLUSTER);
  // What lies outside of the tokens would be slow to read: the last tile goes over some of the one before it again.
  const int token = max(0, min(((group % token_groups) * TOKENS_IN_CLUSTER + ct) * TOKENS, tokens - TOKENS));
  const int row = ((group / token_groups) * ROWS_IN_CLUSTER + cr) * ROWS;
  const int share = (steps + SPLITS - 1) / SPLITS;
  const int first = cs * share, count = min(steps, first + share) - first;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * stage));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * stage), "n"(4 * WG * READERS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (CLUSTER > 1) {
    cluster_arrive();
    cluster_wait();
  }

  if (warp >= WORKERS / 32) {
#if REGISTERS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SCALES ? 32 : 24));
#endif
#if SCALES
    if (warp > WORKERS / 32) {
      // Sixteen lanes for each token, each lane four stretches of 64.
      constexpr int AT_ONCE = SCALERS / 16, FLIGHT = REGISTERS ? 2 : 8;
      const int part = threadIdx.x % 16, mine = (threadIdx.x - WORKERS - 32) / 16;
      asm volatile("griddepcontrol.wait;" ::: "memory");
      for (int begin = mine; begin < TOKENS; begin += FLIGHT * AT_ONCE) {
        float squares[FLIGHT];
#pragma unroll
        for (int n = 0; n < FLIGHT; n++) squares[n] = 0.0f;
        for (int stretch = 4 * part; stretch < norm.stretches; stretch += 64) {
          uint4 four[FLIGHT];
#pragma unroll
          for (int n = 0; n < FLIGHT; n++)
            four[n] = read(norm.squares + (u64)min(token + begin + n * AT_ONCE, tokens - 1) * norm.pitch + stretch);
#pragma unroll
          for (int n = 0; n < FLIGHT; n++) {
            squares[n] += __uint_as_float(four[n].x);
            if (stretch + 1 < norm.stretches) squares[n] += __uint_as_float(four[n].y);
            if (stretch + 2 < norm.stretches) squares[n] += __uint_as_float(four[n].z);
            if (stretch + 3 < norm.stretches) squares[n] += __uint_as_float(four[n].w);
          }
        }
#pragma unroll
        for (int n = 0; n < FLIGHT; n++) {
#pragma unroll
          for (int apart = 8; apart; apart /= 2) squares[n] += __shfl_xor_sync(~0u, squares[n], apart);
          const int t = begin + n * AT_ONCE;
          if (part == 0 && t < TOKENS) ((float*)factors)[t] = rsqrtf(squares[n] * norm.share + norm.eps);
        }
      }
      __syncwarp();
      asm volatile("bar.arrive 6, %0;" ::"n"(WORKERS + SCALERS) : "memory");
    }
#endif
    if (threadIdx.x == WORKERS) {
      const int mine = TOKENS_IN_CLUSTER * (cr + ROWS_IN_CLUSTER * cs);
      const u16 w_mask = ((1 << TOKENS_IN_CLUSTER) - 1) << mine;
      u16 x_mask = 0;
      for (int other = 0; other < ROWS_IN_CLUSTER; other++)
        x_mask |= 1 << (ct + TOKENS_IN_CLUSTER * (other + ROWS_IN_CLUSTER * cs));
      const TensorMap* w_part = ct == TOKENS_IN_CLUSTER - 1 ? &w_last_map : &w_map;
      const u32 w_base = base + ct * W_FIRST * 128;
      const u32 x_base = base + STAGES * W_BYTES + cr * (X_BYTES / ROWS_IN_CLUSTER);
      const int w_row = row + ct * W_FIRST, x_token = token + cr * (TOKENS / ROWS_IN_CLUSTER);
      const int ahead = min(STAGES, count);
      // Weights depend on no other kernel.
      for (int step = 0; step < ahead; step++) {
        expect(full + 8 * step);
        load_weights(w_base + step * W_BYTES, w_part, full + 8 * step, (first + step) * 64, w_row, w_mask);
      }
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      for (int step = 0; step < ahead; step++)
        load_tokens(x_base + step * X_BYTES, &x_map, full + 8 * step, (first + step) * 64, x_token, x_mask);
      for (int step = ahead; step < count; step++) {
        const int stage = step % STAGES;
        wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
        expect(full + 8 * stage);
        load_weights(w_base + stage * W_BYTES, w_part, full + 8 * stage, (first + step) * 64, w_row, w_mask);
        load_tokens(x_base + stage * X_BYTES, &x_map, full + 8 * stage, (first + step) * 64, x_token, x_mask);
      }
    }
    __syncwarp();
    if (CLUSTER > 1) {
      cluster_arrive();
      cluster_wait();
    }
    if (SPLITS > 1) {
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

#if REGISTERS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#endif
  const int wg = warp / 4, place = warp % 4;
#if ADDS
  const int thread = SWAPPED ? lane : threadIdx.x % 128;
  const int my_token = token + (SWAPPED ? wg * 64 + place * 16 + (SPLITS > 1 ? 8 * cs : 0) : cs * PORTION) + thread / LANES;
  const int my_column = row + (SWAPPED ? 0 : wg * 64) + thread % LANES * 8;
  constexpr int NEXT_TOKEN = SWAPPED ? 0 : 16, NEXT_COLUMN = SWAPPED ? LANES * 8 : 0;
  const int end = min(columns, row + ROWS);
  uint4 added[HELD], norm_weights[SWAPPED ? HELD : 1];
  const auto read_weights = [&]() {
#pragma unroll
    for (int n = 0; n < (SWAPPED ? HELD : 1); n++) {
      const int column = my_column + n * NEXT_COLUMN;
      norm_weights[n] = column < end ? read(norm.weights + column) : make_uint4(0, 0, 0, 0);
    }
  };
  const auto read_added = [&]() {
#pragma unroll
    for (int n = 0; n < HELD; n++) {
      const int t = my_token + n * NEXT_TOKEN, column = my_column + n * NEXT_COLUMN;
      added[n] = t < tokens && column < end ? read(norm.residual + (u64)t * columns + column) : make_uint4(0, 0, 0, 0);
    }
  };
  if (EARLY) {
    read_weights();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    read_added();
  }
#endif
  float d[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) d[i] = 0.0f;

  // Lane i of each warp tells one of the blocks that write into this one's buffers that the warp has read one.
  u32 reader = empty;
  if (CLUSTER > 1) {
    const int other = lane - TOKENS_IN_CLUSTER < cr ? lane - TOKENS_IN_CLUSTER : lane - TOKENS_IN_CLUSTER + 1;
    const int target = lane < TOKENS_IN_CLUSTER ? lane + TOKENS_IN_CLUSTER * (cr + ROWS_IN_CLUSTER * cs)
                                                : ct + TOKENS_IN_CLUSTER * (other + ROWS_IN_CLUSTER * cs);
    reader = remote_address(empty, lane < READERS ? target : rank);
  }
  const u32 x_start = base + STAGES * W_BYTES;
  const u64 tall_tile = describe((SWAPPED ? x_start : base) + wg * 8192), side_tile = describe(SWAPPED ? base : x_start);
  int stage = 0, parity = 0, before = 0;
  for (int step = 0; step < count; step++) {
    wait(full + 8 * stage, parity);
    const u64 tall = tall_tile + (u64)(stage * ((SWAPPED ? X_BYTES : W_BYTES) / 16));
    const u64 side = side_tile + (u64)(stage * ((SWAPPED ? W_BYTES : X_BYTES) / 16));
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int part = 0; part < SIDE / WIDTH; part++)
        multiply(d + part * (WIDTH / 2), tall + 2 * k, side + 2 * k + part * WIDTH * 8);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    // What it has read came and went by the copy engine and the matrix units: there is nothing to publish.
    if (step > 0 && lane < READERS)
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(reader + 8 * before) : "memory");
    before = stage;
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(d[i])::"memory");

#if SCALES
  asm volatile("bar.sync 6, %0;" ::"n"(WORKERS + SCALERS) : "memory");
#endif
  // No block may leave, or write into another's buffers, before all of its cluster have done with them.
  if (CLUSTER > 1) {
    __syncwarp();
    cluster_arrive();
    cluster_wait();
  } else {
    workers_meet();
  }

#if SWAPPED
  // A thread has rows r and r + 8 of its warp's 16 tokens: of two splits each adds up one of them.
  constexpr int EIGHTS = ROWS / 8;
  constexpr int PITCH = (EIGHTS | 1) * 16;  // an odd number of 16 bytes, so that rows begin in different banks
  static_assert(SPLITS <= 2 && !GATED, "two splits, no gate");
#if SPLITS > 1
  const u32 mine = base + threadIdx.x * 8;
  const u32 there = remote_address(mine, ct + TOKENS_IN_CLUSTER * (cr + ROWS_IN_CLUSTER * (1 - cs)));
#pragma unroll
  for (int i = 0; i < EIGHTS; i++)
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there + i * WORKERS * 8),
                 "f"(cs ? d[4 * i] : d[4 * i + 2]), "f"(cs ? d[4 * i + 1] : d[4 * i + 3]) : "memory");
  cluster_publish();
  cluster_wait();
#endif
  const u32 area = base + (SPLITS > 1 ? EIGHTS * WORKERS * 8 : 0) + warp * (16 / SPLITS * PITCH);
#if SCALES
  const float* factor = (const float*)factors + warp * 16 + lane / 4;
  const float upper = factor[0], lower = factor[8];
#else
  const float upper = 1.0f, lower = 1.0f;
#endif
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    const int column = row + 8 * i + 2 * (lane % 4);
    const float first = bias && column < columns ? widen(bias[column]) : 0.0f;
    const float second = bias && column < columns ? widen(bias[column + 1]) : 0.0f;
    const u32 spot = area + lane / 4 * PITCH + i * 16 + lane % 4 * 4;
#if SPLITS > 1
    float other[2];
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(other[0]), "=f"(other[1]) : "r"(mine + i * WORKERS * 8) : "memory");
    const float scale = cs ? lower : upper;
    const u32 value = pack(((cs ? d[4 * i + 2] : d[4 * i]) + other[0]) * scale + first,
                           ((cs ? d[4 * i + 3] : d[4 * i + 1]) + other[1]) * scale + second);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(spot), "r"(value) : "memory");
#else
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(spot), "r"(pack(d[4 * i] * upper + first, d[4 * i + 1] * upper + second)) : "memory");
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(spot + 8 * PITCH), "r"(pack(d[4 * i + 2] * lower + first, d[4 * i + 3] * lower + second)) : "memory");
#endif
  }
  __syncwarp();
#if ADDS
  if (!EARLY) {
    read_weights();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    read_added();
  }
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < HELD; n++) {
    const int column = my_column + n * NEXT_COLUMN;
    if (my_token < tokens && column < end) {
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(area + thread / LANES * PITCH + (thread % LANES + n * LANES) * 16) : "memory");
      const u64 spot = (u64)my_token * columns + column;
      squares += add_eight(v, added[n], norm_weights[n], out_pointer + spot, norm.weighted + spot);
    }
  }
#pragma unroll
  for (int apart = LANES / 2; apart; apart /= 2) squares += __shfl_xor_sync(~0u, squares, apart);
  if (thread % LANES == 0 && my_token < tokens && row < columns)
    norm.squares[(u64)my_token * norm.pitch + row / ROWS] = squares;
#else
  const int first_token = token + wg * 64 + place * 16 + (SPLITS > 1 ? 8 * cs : 0);
  for (int chunk = lane; chunk < 16 / SPLITS * EIGHTS; chunk += 32) {
    const int t = chunk / EIGHTS, column = row + chunk % EIGHTS * 8;
    u32 v[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(area + t * PITCH + chunk % EIGHTS * 16) : "memory");
    if (first_token + t < tokens && column < columns)
      *(uint4*)(out_pointer + (u64)(first_token + t) * columns + column) = make_uint4(v[0], v[1], v[2], v[3]);
  }
#endif
#else
  float sum[PORTION / 2];
  u32 staging = base;
#if SPLITS > 1
  constexpr int PART_BYTES = ROWS * PORTION * 4;
#pragma unroll
  for (int portion = 0; portion < SPLITS; portion++) {
    if (portion == cs) continue;
    const int target = ct + TOKENS_IN_CLUSTER * (cr + ROWS_IN_CLUSTER * portion);
    const u32 there = remote_address(base + (cs < portion ? cs : cs - 1) * PART_BYTES + threadIdx.x * 16, target);
#pragma unroll
    for (int i = 0; i < PORTION / 8; i++) {
      const float* part = d + portion * (PORTION / 2) + 4 * i;
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(there + i * WORKERS * 16), "f"(part[0]),
                   "f"(part[1]), "f"(part[2]), "f"(part[3]) : "memory");
    }
  }
  cluster_publish();
#pragma unroll
  for (int portion = 0; portion < SPLITS; portion++)
    if (portion == cs)
#pragma unroll
      for (int i = 0; i < PORTION / 2; i++) sum[i] = d[portion * (PORTION / 2) + i];
  cluster_wait();
  // In the order of the parts, so that each element is the same sum in whichever block it is made.
#pragma unroll
  for (int i = 0; i < PORTION / 8; i++) {
    float own[4] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int part = 0; part < SPLITS; part++) {
      float other[4];
      const u32 here = base + (part < cs ? part : part - 1) * PART_BYTES + threadIdx.x * 16 + i * WORKERS * 16;
      if (part == cs) {
        for (int j = 0; j < 4; j++) other[j] = own[j];
      } else {
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(other[0]), "=f"(other[1]), "=f"(other[2]), "=f"(other[3]) : "r"(here) : "memory");
      }
      for (int j = 0; j < 4; j++) total[j] += other[j];
    }
    for (int j = 0; j < 4; j++) sum[4 * i + j] = total[j];
  }
  staging = base + (((SPLITS - 1) * PART_BYTES + 1023) & ~1023);
#else
#pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) sum[i] = d[i];
#endif

  // Rows of the weights' tile turn into columns of the output: tokens x COLUMNS for each warp group, then one copy.
  const u32 out = staging + wg * (PORTION * COLUMNS * 2);
  const int in_eight = lane % 8, matrix = lane / 8;
#if SCALES
#pragma unroll
  for (int i = 0; i < PORTION / 8; i++) {
    const float2 factor = factors[(cs * PORTION + 8 * i) / 2 + lane % 4];
    sum[4 * i] *= factor.x;
    sum[4 * i + 1] *= factor.y;
    sum[4 * i + 2] *= factor.x;
    sum[4 * i + 3] *= factor.y;
  }
#endif
#if GATED
#pragma unroll
  for (int i = 0; i < PORTION / 8; i += 4) {
    u32 values[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float* v = sum + 4 * (i + j);
      values[j] = pack(gate(v[0], v[2]), gate(v[1], v[3]));
    }
    const int t = 8 * (i + matrix) + in_eight;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     out + t * 64 + ((place ^ (t >> 1 & 3)) << 4)),
                 "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]) : "memory");
  }
#else
  const int column = row + wg * 64 + place * 16 + lane / 4;
  const float upper = bias && column < columns ? widen(bias[column]) : 0.0f;
  const float lower = bias && column + 8 < columns ? widen(bias[column + 8]) : 0.0f;
#pragma unroll
  for (int i = 0; i < PORTION / 8; i += 2) {
    const float* v = sum + 4 * i;
    const u32 values[4] = {pack(v[0] + upper, v[1] + upper), pack(v[2] + lower, v[3] + lower),
                           pack(v[4] + upper, v[5] + upper), pack(v[6] + lower, v[7] + lower)};
    const int t = 8 * (i + (matrix >> 1)) + in_eight;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                     out + t * 128 + (((2 * place + (matrix & 1)) ^ (t & 7)) << 4)),
                 "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]) : "memory");
  }
#endif
#if ADDS
  if (!EARLY) {
    read_weights();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    read_added();
  }
  asm volatile("bar.sync %0, 128;" ::"r"(2 + wg) : "memory");
#pragma unroll
  for (int n = 0; n < HELD; n++) {
    const int t = my_token + n * NEXT_TOKEN, staged = thread / LANES + n * NEXT_TOKEN;
    float squares = 0.0f;
    if (t < tokens && my_column < end) {
      uint4 v;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                   : "r"(out + staged * 128 + ((thread % 8 ^ (staged & 7)) << 4)) : "memory");
      const u64 spot = (u64)t * columns + my_column;
      squares = add_eight(v, added[n], norm_weights[0], out_pointer + spot, norm.weighted + spot);
    }
#pragma unroll
    for (int apart = 4; apart; apart /= 2) squares += __shfl_xor_sync(~0u, squares, apart);
    if (thread % 8 == 0 && t < tokens && my_column < end)
      norm.squares[(u64)t * norm.pitch + row / 64 + wg] = squares;
  }
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(2 + wg) : "memory");
  if (threadIdx.x % 128 == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out_map),
                 "r"(row / 64 * COLUMNS + wg * COLUMNS), "r"(token + cs * PORTION), "r"(out) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
#endif
#endif
}
