// Multi-scale deformable attention, forward, in CUDA C++: one launch, no allocation, no synchronization, so that it can
// be recorded in a CUDA graph. The definition is `reference` in src/detrt/models/ops/msda.py.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

namespace detrt::kernels {

enum class FloatType : std::int32_t { fp32, fp16, bf16 };

// Implementation. `automatic` selects the fastest that supports the call; the others are for tests and benchmarks.
enum class Method : std::int32_t { automatic, tensor_cores, vectors, scalars };

inline constexpr std::int32_t max_levels = 32;
inline constexpr std::int64_t max_points = 1024;    // of all levels together, for one query and head
inline constexpr std::int64_t max_tokens = 1 << 23; // of one image: integers that FP32 holds exactly

// All pointers are device memory. value and out: aligned to 16 bytes for the fast methods; locations: to 8 bytes.
struct MsDeformAttn {
  const void* value = nullptr;      // (batch, tokens, heads, dim), levels one after the other, row-major; finite
  const void* shapes = nullptr;     // (levels, 2) int32 or int64: height, width
  const float* locations = nullptr; // (batch, queries, heads, points, 2): x, y in 0..1 of the level
  const void* weights = nullptr;    // (batch, queries, heads, points), FP32 or the type of value
  void* out = nullptr;              // (batch, queries, heads * dim), type of value
  FloatType value_type = FloatType::fp32, weights_type = FloatType::fp32;
  bool shapes_are_int64 = false;
  bool discrete = false; // read the nearest pixel, clamped to the level, instead of the bilinear sample
  std::int64_t batch = 0, tokens = 0, heads = 0, dim = 0, queries = 0;
  std::vector<std::int32_t> points; // of each level
  Method method = Method::automatic;
};

// Enqueues the kernel. Samples outside their level, NaN locations, and levels that do not fit into `tokens` contribute
// zero. Coordinates and sums are FP32; the result is rounded once.
// Returns cudaErrorInvalidValue for unsupported sizes, types, alignments or methods, else the status of the launch.
cudaError_t ms_deform_attn(const MsDeformAttn& call, cudaStream_t stream) noexcept;

// The method that `automatic` selects for this call.
Method chosen_method(const MsDeformAttn& call) noexcept;

} // namespace detrt::kernels
