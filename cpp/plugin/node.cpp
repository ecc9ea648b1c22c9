#include "node.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "ms_deform_attn.hpp"

namespace detrt::plugin {
namespace {

using kernels::FloatType;
using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

bool is_value(DataType type) {
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kBF16)
    return true;
#endif
  return type == DataType::kFLOAT || type == DataType::kHALF;
}

bool is_int64([[maybe_unused]] DataType type) {
#if NV_TENSORRT_MAJOR >= 10
  return type == DataType::kINT64;
#else
  return false;
#endif
}

FloatType float_type(DataType type) {
#if NV_TENSORRT_MAJOR >= 10
  if (type == DataType::kBF16)
    return FloatType::bf16;
#endif
  return type == DataType::kHALF ? FloatType::fp16 : FloatType::fp32;
}

std::string text_of(const nvinfer1::Dims& dims) {
  std::string text = "(";
  for (std::int32_t i = 0; i < dims.nbDims; ++i)
    text += (i ? ", " : "") + std::to_string(dims.d[i]);
  return text + ")";
}

// A symbolic length is -1.
bool agree(std::int64_t length, std::int64_t wanted) {
  return length < 0 || wanted < 0 || length == wanted;
}

std::int32_t one_number(const PluginField& field) {
  if (field.data == nullptr || field.length != 1)
    throw std::invalid_argument(std::string("attribute '") + field.name + "' must be one integer");
  if (field.type == PluginFieldType::kINT32)
    return *static_cast<const std::int32_t*>(field.data);
#if NV_TENSORRT_MAJOR >= 10
  if (field.type == PluginFieldType::kINT64)
    return static_cast<std::int32_t>(*static_cast<const std::int64_t*>(field.data));
#endif
  throw std::invalid_argument(std::string("attribute '") + field.name + "' must be INT32 or INT64");
}

std::vector<std::int32_t> numbers(const PluginField& field) {
  std::vector<std::int32_t> found;
  for (std::int32_t i = 0; i < field.length; ++i)
    if (field.data != nullptr && field.type == PluginFieldType::kINT32)
      found.push_back(static_cast<const std::int32_t*>(field.data)[i]);
#if NV_TENSORRT_MAJOR >= 10
    else if (field.data != nullptr && field.type == PluginFieldType::kINT64)
      found.push_back(static_cast<std::int32_t>(static_cast<const std::int64_t*>(field.data)[i]));
#endif
    else
      throw std::invalid_argument(std::string("attribute '") + field.name + "' must be integers, INT32 or INT64");
  return found;
}

} // namespace

Attributes Attributes::of(const PluginFieldCollection& fields) {
  Attributes found;
  for (std::int32_t i = 0; i < fields.nbFields; ++i) {
    const PluginField& field = fields.fields[i];
    const std::string name = field.name ? field.name : "";
    if (name == "heads")
      found.heads = one_number(field);
    else if (name == "head_dim")
      found.head_dim = one_number(field);
    else if (name == "discrete")
      found.discrete = one_number(field);
    else if (name == "points_per_level")
      found.points_per_level = numbers(field);
  }
  const std::int64_t points =
      std::accumulate(found.points_per_level.begin(), found.points_per_level.end(), std::int64_t{0});
  const auto levels = static_cast<std::int64_t>(found.points_per_level.size());
  if (found.heads < 1 || found.head_dim < 1)
    throw std::invalid_argument("attributes heads and head_dim must be at least 1; got " + std::to_string(found.heads) +
                                " and " + std::to_string(found.head_dim));
  if (found.discrete != 0 && found.discrete != 1)
    throw std::invalid_argument("attribute discrete must be 0 or 1; got " + std::to_string(found.discrete));
  if (levels < 1 || levels > kernels::max_levels || points > kernels::max_points ||
      std::any_of(found.points_per_level.begin(), found.points_per_level.end(), [](std::int32_t n) { return n < 0; }))
    throw std::invalid_argument("attribute points_per_level must have 1 to " + std::to_string(kernels::max_levels) +
                                " numbers from 0, of " + std::to_string(kernels::max_points) +
                                " at most together; got " + std::to_string(levels) + " numbers, together " +
                                std::to_string(points));
  return found;
}

const PluginFieldCollection& field_names() {
  static const std::array<PluginField, 4> names{PluginField("heads", nullptr, PluginFieldType::kINT32, 1),
                                                PluginField("head_dim", nullptr, PluginFieldType::kINT32, 1),
                                                PluginField("points_per_level", nullptr, PluginFieldType::kINT32, 1),
                                                PluginField("discrete", nullptr, PluginFieldType::kINT32, 1)};
  static const PluginFieldCollection collection{static_cast<std::int32_t>(names.size()), names.data()};
  return collection;
}

void check_shapes(const Attributes& attributes, const std::array<nvinfer1::Dims, input_count>& in) {
  const auto levels = static_cast<std::int64_t>(attributes.points_per_level.size());
  const std::int64_t points =
      std::accumulate(attributes.points_per_level.begin(), attributes.points_per_level.end(), std::int64_t{0});
  constexpr std::int64_t any = -1;
  const auto require = [&](Input index, const char* name, std::initializer_list<std::int64_t> wanted) {
    const nvinfer1::Dims& got = in[static_cast<std::size_t>(index)];
    bool good = got.nbDims == static_cast<std::int32_t>(wanted.size());
    std::int32_t axis = 0;
    for (const std::int64_t length : wanted) {
      good = good && agree(got.d[axis], length);
      ++axis;
    }
    if (good)
      return;
    std::string text;
    for (const std::int64_t length : wanted)
      text += (text.empty() ? "" : ", ") + (length < 0 ? std::string("any") : std::to_string(length));
    throw std::invalid_argument(std::string(name) + " has shape " + text_of(got) + "; it must be (" + text + ")");
  };
  require(value, "value", {any, any, attributes.heads, attributes.head_dim});
  require(shapes, "level sizes", {levels, 2});
  const std::int64_t batch = in[value].d[0];
  require(locations, "locations", {batch, any, attributes.heads, points, 2});
  require(weights, "weights", {batch, in[locations].d[1], attributes.heads, points});
}

void check_run(const Attributes& attributes, const PluginTensorDesc* in) {
  check_shapes(attributes, {in[value].dims, in[shapes].dims, in[locations].dims, in[weights].dims});
  if (in[value].dims.d[1] >= kernels::max_tokens)
    throw std::invalid_argument("value has " + std::to_string(in[value].dims.d[1]) + " tokens; at most " +
                                std::to_string(kernels::max_tokens - 1) + " are possible");
}

bool takes(std::int32_t position, const PluginTensorDesc& tensor, DataType value_type) {
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR)
    return false;
  switch (position) {
  case value:
    return is_value(tensor.type);
  case shapes:
    return tensor.type == DataType::kINT32 || is_int64(tensor.type);
  case locations:
    return tensor.type == DataType::kFLOAT; // FP16 would move samples of wide levels by a quarter of a pixel
  case weights:
    return tensor.type == DataType::kFLOAT || tensor.type == value_type;
  default:
    return tensor.type == value_type;
  }
}

void start(const Attributes& attributes, const PluginTensorDesc* in, const PluginTensorDesc* out,
           const void* const* inputs, void* const* outputs, cudaStream_t stream) {
  if (in == nullptr || out == nullptr || inputs == nullptr || outputs == nullptr)
    throw std::invalid_argument("TensorRT gave no tensors");
  kernels::MsDeformAttn call;
  call.value = inputs[value];
  call.shapes = inputs[shapes];
  call.locations = static_cast<const float*>(inputs[locations]);
  call.weights = inputs[weights];
  call.out = outputs[0];
  call.value_type = float_type(in[value].type);
  call.weights_type = float_type(in[weights].type);
  call.shapes_are_int64 = is_int64(in[shapes].type);
  call.discrete = attributes.discrete != 0;
  call.batch = in[value].dims.d[0];
  call.tokens = in[value].dims.d[1];
  call.heads = attributes.heads;
  call.dim = attributes.head_dim;
  call.queries = in[locations].dims.d[1];
  call.points = attributes.points_per_level;
  const cudaError_t status = kernels::ms_deform_attn(call, stream);
  if (status != cudaSuccess)
    throw std::runtime_error(std::string("the kernel was not started: ") + cudaGetErrorString(status));
}

} // namespace detrt::plugin
