#include "ms_deform_attn.hpp"

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "samples.cuh"

namespace detrt::kernels {
namespace {

using device::BlockLevel;
using device::Call;
using device::Level;
using device::Sample;

constexpr int tensor_core_threads = 128, vector_threads = 256;

template <class T> constexpr bool is_half = sizeof(T) == 2;

__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                             __half) {
#if __CUDA_ARCH__ >= 800 // not reached on older GPUs: see can()
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                             __nv_bfloat16) {
#if __CUDA_ARCH__ >= 800 // not reached on older GPUs: see can()
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

__device__ __forceinline__ unsigned packed(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ unsigned packed(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float2 unpacked(unsigned bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}
__device__ __forceinline__ float2 unpacked(unsigned bits, __nv_bfloat16) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}

// FP16 and BF16 values, dim 16 to 64 in steps of 8: the weighted sum of the corners as a matmul.
//
// A warp works on 8 / Lanes queries of one head, Lanes lanes of 8 channels each. Lane (g, t), g = lane / 4, t = lane %
// 4, reads the 8 channels of its block at the four corners of sample t: these are row g and g + 8 (two channels at a
// time) and columns 2t, 2t + 1, 2t + 8, 2t + 9 of the left matrix. It also gives column g of the right matrix: the
// weights of the same corners, rounded, in the first lane of the query, and the rounding errors in the second lane. So
// the sum of two columns of the product is the sum with FP32 weights, to 22 (BF16: 16) bits.
template <class T, class W, int Lanes, bool Discrete>
__global__ void __launch_bounds__(tensor_core_threads) tensor_core_kernel(const __grid_constant__ Call call) {
  extern __shared__ Level table[];
  constexpr int per_warp = 8 / Lanes, warps = tensor_core_threads / 32, groups = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const int in_warp = g / Lanes, block = g % Lanes, points = call.points;
  const std::int64_t plane = blockIdx.x / call.tiles, tile = blockIdx.x % call.tiles;
  const std::int64_t image = plane / call.heads, head = plane % call.heads;
  const bool channels = block * 8 < call.dim;
  const char* values = static_cast<const char*>(call.value) +
                       ((image * call.tokens * call.heads + head) * call.dim + (channels ? block * 8 : 0)) * 2;
  const unsigned stride = static_cast<unsigned>(call.heads * call.dim * 2);
  values -= static_cast<std::uint64_t>(device::whole_bits) * stride;
  std::int64_t query = (tile * call.passes * warps + static_cast<int>(threadIdx.x) / 32) * per_warp + in_warp;
  bool filled = false;

  for (int pass = 0; pass < call.passes; ++pass, query += warps * per_warp) {
    const bool live = query < call.queries;
    const std::int64_t row = (image * call.queries + (live ? query : 0)) * call.heads + head;
    const float2* locations = reinterpret_cast<const float2*>(call.locations) + row * points;
    const W* weights = static_cast<const W*>(call.weights) + row * points;
    float sums[4][4] = {};
    for (int first = 0; first < points || !filled; first += 4 * groups) {
      float2 location[groups];
      float weight[groups];
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        const int point = first + 4 * i + t;
        const bool there = live && point < points;
        location[i] = there ? __ldg(locations + point) : make_float2(0.0f, 0.0f);
        weight[i] = there ? device::as_float(weights[point]) : 0.0f;
      }
      if (!filled) { // after the first reads were issued
        device::fill_table(call, table, (points + 15) / 16 * 16);
        __syncthreads();
        filled = true;
        if (points == 0)
          break;
      }
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        if (first + 4 * i >= points)
          break;
        const Sample<Discrete> sample = device::sample_of<Discrete>(table[first + 4 * i + t], location[i], weight[i]);
        uint4 corner[4];
        float share[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (c < Sample<Discrete>::corners) {
            corner[c] =
                __ldg(reinterpret_cast<const uint4*>(values + static_cast<std::uint64_t>(sample.cell[c]) * stride));
            share[c] = sample.weight[c];
          } else {
            corner[c] = make_uint4(0, 0, 0, 0);
            share[c] = 0.0f;
          }
        }
        unsigned b0 = packed(share[0], share[1], T()), b1 = packed(share[2], share[3], T());
        const float2 kept0 = unpacked(b0, T()), kept1 = unpacked(b1, T());
        const unsigned lost0 = packed(share[0] - kept0.x, share[1] - kept0.y, T());
        const unsigned lost1 = packed(share[2] - kept1.x, share[3] - kept1.y, T());
        b0 = block == 1 ? lost0 : b0;
        b1 = block == 1 ? lost1 : b1;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned words[4] = {(&corner[0].x)[j], (&corner[1].x)[j], (&corner[2].x)[j], (&corner[3].x)[j]};
          const unsigned a[4] = {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[0], words[1], 0x7632),
                                 __byte_perm(words[2], words[3], 0x5410), __byte_perm(words[2], words[3], 0x7632)};
          multiply_add(sums[j], a, b0, b1, T());
        }
      }
    }
    if (live && channels && t == in_warp * (Lanes / 2)) {
      uint4 result;
      result.x = packed(sums[0][0] + sums[0][1], sums[0][2] + sums[0][3], T());
      result.y = packed(sums[1][0] + sums[1][1], sums[1][2] + sums[1][3], T());
      result.z = packed(sums[2][0] + sums[2][1], sums[2][2] + sums[2][3], T());
      result.w = packed(sums[3][0] + sums[3][1], sums[3][2] + sums[3][3], T());
      *reinterpret_cast<uint4*>(static_cast<T*>(call.out) + row * call.dim + block * 8) = result;
    }
  }
}

template <class T, int N> struct alignas(sizeof(T) * N) Pack {
  T item[N];
};

// The work of a thread of vector_kernel: N channels from `channel` on, of one query and head.
struct Place {
  std::int64_t image, head, query, channel;
};

__device__ __forceinline__ Place place_of(const Call& call, int width) {
  const std::int64_t plane = blockIdx.x / call.tiles, tile = blockIdx.x % call.tiles;
  const std::int64_t lanes = call.dim / width, place = tile * vector_threads + threadIdx.x;
  return {plane / call.heads, plane % call.heads, place / lanes, place % lanes * width};
}

// The same with `beside` heads of a query as neighbours: the pixels of one head are a multiple of 128 bytes apart,
// which causes bank conflicts in the L1 cache.
__device__ __forceinline__ Place place_beside(const Call& call, int width) {
  const unsigned tiles = static_cast<unsigned>(call.tiles), plane = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const unsigned groups = static_cast<unsigned>(call.heads) / call.beside,
                 lanes = static_cast<unsigned>(call.dim) / width;
  // Rows are computed per block if possible: 64-bit divisions are slow.
  const bool whole_rows = vector_threads % lanes == 0;
  const std::int64_t place = std::int64_t{tile} * vector_threads + threadIdx.x;
  const std::int64_t row =
      whole_rows ? std::int64_t{tile} * (vector_threads / lanes) + threadIdx.x / lanes : place / lanes;
  const unsigned channel = static_cast<unsigned>(whole_rows ? threadIdx.x % lanes : place % lanes) * width;
  return {plane / groups, plane % groups * call.beside + (row & (call.beside - 1)), row >> call.beside_bits, channel};
}

// Any type and dim: a thread sums N channels of one query and head. Many: for many queries.
template <class T, class W, int N, bool Discrete, bool Many>
__global__ void __launch_bounds__(vector_threads) vector_kernel(const __grid_constant__ Call call) {
  using Row = std::conditional_t<Many, BlockLevel, Level>;
  extern __shared__ float4 rows[];
  Row* table = reinterpret_cast<Row*>(rows);
  device::fill_table(call, table, call.points);
  __syncthreads();
  const auto [image, head, query, channel] = Many ? place_beside(call, N) : place_of(call, N);
  if (query >= call.queries)
    return;
  const int points = call.points;
  const T* values = static_cast<const T*>(call.value) + (image * call.tokens * call.heads + head) * call.dim + channel;
  const unsigned stride = static_cast<unsigned>(call.heads * call.dim);
  const std::int64_t row = (image * call.queries + query) * call.heads + head;
  const float2* locations = reinterpret_cast<const float2*>(call.locations) + row * points;
  const W* weights = static_cast<const W*>(call.weights) + row * points;
  float sums[N] = {};
#pragma unroll 4
  for (int point = 0; point < points; ++point) {
    const float2 location = __ldg(locations + point);
    const float weight = device::as_float(weights[point]);
    Sample<Discrete> sample;
    if constexpr (Many)
      sample = device::sample_of(table[point], location, weight);
    else
      sample = device::sample_of<Discrete, !is_half<T>>(table[point], location, weight);
#pragma unroll
    for (int c = 0; c < Sample<Discrete>::corners; ++c) {
      const std::uint64_t cell = sample.cell[c] - device::whole_bits;
      const Pack<T, N> corner = *reinterpret_cast<const Pack<T, N>*>(values + cell * stride);
#pragma unroll
      for (int n = 0; n < N; ++n)
        sums[n] = fmaf(sample.weight[c], device::as_float(corner.item[n]), sums[n]);
    }
  }
  Pack<T, N> result;
#pragma unroll
  for (int n = 0; n < N; ++n)
    result.item[n] = device::rounded<T>(sums[n]);
  *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(call.out) + row * call.dim + channel) = result;
}

using Kernel = void (*)(Call);

template <class T, class W, bool Discrete> Kernel kernel_of(Method method, std::int64_t dim, bool many, int& channels) {
  if constexpr (is_half<T>)
    if (method == Method::tensor_cores) {
      channels = 8;
      return dim <= 16   ? tensor_core_kernel<T, W, 2, Discrete>
             : dim <= 32 ? tensor_core_kernel<T, W, 4, Discrete>
                         : tensor_core_kernel<T, W, 8, Discrete>;
    }
  constexpr int wide = 16 / static_cast<int>(sizeof(T));
  channels = method == Method::vectors ? wide : 1;
  if constexpr (is_half<T> && !Discrete)
    if (many && method == Method::vectors)
      return vector_kernel<T, W, wide, false, true>;
  return method == Method::vectors ? vector_kernel<T, W, wide, Discrete, false>
                                   : vector_kernel<T, W, 1, Discrete, false>;
}

template <class T> Kernel kernel_of(const MsDeformAttn& call, Method method, bool many, int& channels) {
  const bool wide = call.weights_type == FloatType::fp32;
  if (call.discrete)
    return wide ? kernel_of<T, float, true>(method, call.dim, many, channels)
                : kernel_of<T, T, true>(method, call.dim, many, channels);
  return wide ? kernel_of<T, float, false>(method, call.dim, many, channels)
              : kernel_of<T, T, false>(method, call.dim, many, channels);
}

bool aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// m16n8k16 needs compute capability 8.0.
bool has_tensor_cores() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 8;
}

bool can(const MsDeformAttn& call, Method method) {
  const bool half = call.value_type != FloatType::fp32;
  const bool whole_words = aligned(call.value, 16) && aligned(call.out, 16) && call.dim % (half ? 8 : 4) == 0;
  if (method == Method::tensor_cores)
    return half && whole_words && call.dim >= 16 && call.dim <= 64 && has_tensor_cores();
  return method == Method::vectors ? whole_words : true;
}

bool valid(const MsDeformAttn& call, std::int64_t points) {
  const std::int64_t most = std::int64_t{1} << 31;
  for (const std::int64_t size : {call.batch, call.tokens, call.heads, call.dim, call.queries})
    if (size < 0 || size >= most)
      return false;
  for (const std::int32_t count : call.points)
    if (count < 0)
      return false;
  return static_cast<std::int64_t>(call.points.size()) <= max_levels && points <= max_points &&
         call.tokens < max_tokens && call.heads * call.dim * 4 < most &&
         (call.weights_type == FloatType::fp32 || call.weights_type == call.value_type) && aligned(call.locations, 8);
}

int multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 1;
  return count;
}

bool many_sums(const MsDeformAttn& call) {
  return call.batch * call.queries * call.heads > 1 << 15;
}

} // namespace

// Tensor cores need fewer threads per output, which pays while the GPU is not full: 7.3 us against 9.4 us for 900
// queries of 8 heads on an H200. With 22 223 queries they take 113 us and vectors 77 us (docs/guide/plugin.md).
Method chosen_method(const MsDeformAttn& call) noexcept {
  const bool vectors = can(call, Method::vectors);
  if (can(call, Method::tensor_cores) && !(vectors && many_sums(call)))
    return Method::tensor_cores;
  return vectors ? Method::vectors : Method::scalars;
}

cudaError_t ms_deform_attn(const MsDeformAttn& call, cudaStream_t stream) noexcept {
  std::int64_t points = 0;
  Call given{};
  for (std::size_t level = 0; level < call.points.size() && level < max_levels; ++level) {
    points += call.points[level];
    given.ends.end[level] = static_cast<std::int32_t>(std::min(points, max_points));
  }
  if (!valid(call, points))
    return cudaErrorInvalidValue;
  if (call.batch == 0 || call.queries == 0 || call.heads == 0 || call.dim == 0)
    return cudaSuccess;
  const std::size_t item = call.value_type == FloatType::fp32 ? 4 : 2;
  if (call.tokens == 0 || points == 0)
    return cudaMemsetAsync(call.out, 0,
                           static_cast<std::size_t>(call.batch * call.queries * call.heads * call.dim) * item, stream);
  const Method method = call.method == Method::automatic ? chosen_method(call) : call.method;
  if (!can(call, method))
    return cudaErrorInvalidValue;

  given.value = call.value;
  given.shapes = call.shapes;
  given.locations = call.locations;
  given.weights = call.weights;
  given.out = call.out;
  given.batch = call.batch;
  given.tokens = call.tokens;
  given.heads = call.heads;
  given.dim = call.dim;
  given.queries = call.queries;
  given.points = static_cast<std::int32_t>(points);
  given.levels = static_cast<std::int32_t>(call.points.size());
  given.shapes_are_int64 = call.shapes_are_int64;

  // In FP32 a pixel of 32 channels covers all banks anyway; discrete sampling reads little.
  const bool many = many_sums(call) && item == 2 && !call.discrete && method == Method::vectors;
  int channels = 1;
  const Kernel kernel = call.value_type == FloatType::fp32   ? kernel_of<float>(call, method, many, channels)
                        : call.value_type == FloatType::fp16 ? kernel_of<__half>(call, method, many, channels)
                                                             : kernel_of<__nv_bfloat16>(call, method, many, channels);
  const std::int64_t planes = call.batch * call.heads;
  int threads = vector_threads;
  given.passes = 1;
  given.beside = 1;
  if (method == Method::tensor_cores) {
    threads = tensor_core_threads;
    const std::int64_t lanes = call.dim <= 16 ? 2 : call.dim <= 32 ? 4 : 8;
    const std::int64_t in_block = tensor_core_threads / 32 * (8 / lanes),
                       blocks = (call.queries + in_block - 1) / in_block;
    // Many queries: a block computes its table once for several rounds. Few: every block computes one, so that the
    // whole GPU
    // is used.
    given.passes =
        static_cast<std::int32_t>(std::clamp<std::int64_t>(blocks * planes / (16 * multiprocessors()), 1, 8));
    given.tiles = (blocks + given.passes - 1) / given.passes;
  } else {
    const std::int64_t cell = call.dim * static_cast<std::int64_t>(item), banks = 128;
    while (many && call.heads % (2 * std::int64_t{given.beside}) == 0 && given.beside * cell < banks)
      given.beside = 1u << ++given.beside_bits;
    given.tiles = (call.queries * given.beside * (call.dim / channels) + threads - 1) / threads;
  }
  const std::int64_t grid = given.tiles * (planes / given.beside);
  if (grid >= std::int64_t{1} << 31)
    return cudaErrorInvalidValue;
  const std::size_t shared = static_cast<std::size_t>((points + 15) / 16 * 16) * sizeof(BlockLevel);
  (void)cudaGetLastError(); // clears the error of an earlier launch
  kernel<<<static_cast<unsigned>(grid), static_cast<unsigned>(threads), shared, stream>>>(given);
  return cudaGetLastError();
}

} // namespace detrt::kernels
