// The node `detrt.MSDeformAttn`: what its layer is in every interface of TensorRT.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

namespace detrt::plugin {

inline constexpr char plugin_name[] = "MSDeformAttn";
inline constexpr char plugin_version[] = "1";
inline constexpr char plugin_namespace[] = "detrt";

enum Input : std::int32_t { value, shapes, locations, weights, input_count };
inline constexpr std::int32_t failed = 1;

// What TensorRT's registry takes.
#if NV_TENSORRT_MAJOR >= 10
using Creator = nvinfer1::IPluginCreatorInterface;
#else
using Creator = nvinfer1::IPluginCreator;
#endif

// Sends a message to TensorRT's logger, or to standard error if there is none.
void report(const std::string& message) noexcept;

// The attributes of the node; see src/detrt/export/symbolic.py.
struct Attributes {
  std::int32_t heads = 0, head_dim = 0, discrete = 0;
  std::vector<std::int32_t> points_per_level;

  // Throws std::invalid_argument for fields that are missing, of a wrong type or out of range.
  static Attributes of(const nvinfer1::PluginFieldCollection& fields);
};

// Their names, for the parser.
const nvinfer1::PluginFieldCollection& field_names();

// Whether tensor `position` of (inputs, output) may have this type and format, given the type of value. Inputs: value
// (batch, tokens, heads, head_dim) FP32, FP16 or BF16; level sizes (levels, 2) INT32 or INT64; locations (batch,
// queries, heads, points, 2) FP32; weights (batch, queries, heads, points) FP32 or the type of value. Output: (batch,
// queries, heads * head_dim), type of value. TensorRT 8 has no BF16 and no INT64.
bool takes(std::int32_t position, const nvinfer1::PluginTensorDesc& tensor, nvinfer1::DataType value_type);

// Throw std::invalid_argument for shapes that are inconsistent with the attributes or with each other; a symbolic
// length is -1. check_run: also for more tokens than are possible.
void check_shapes(const Attributes& attributes, const std::array<nvinfer1::Dims, input_count>& in);
void check_run(const Attributes& attributes, const nvinfer1::PluginTensorDesc* in);

// Starts the kernel. Throws std::invalid_argument, and std::runtime_error where it was not started.
void start(const Attributes& attributes, const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
           const void* const* inputs, void* const* outputs, cudaStream_t stream);

// Runs a call whose exceptions must not leave the library.
template <class Call> std::int32_t guarded(const char* what, Call&& call) noexcept {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    report(std::string(what) + ": " + error.what());
  } catch (...) {
    report(std::string(what) + ": unknown error");
  }
  return failed;
}

} // namespace detrt::plugin
