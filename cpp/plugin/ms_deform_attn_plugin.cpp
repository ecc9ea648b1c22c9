#include "ms_deform_attn_plugin.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "ms_deform_attn.hpp"

namespace detrt::plugin {
namespace {

using kernels::FloatType;
using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

enum Input : std::int32_t { value, shapes, locations, weights, input_count };
constexpr std::int32_t failed = 1;

bool is_value(DataType type) {
  return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

FloatType float_type(DataType type) {
  return type == DataType::kHALF ? FloatType::fp16 : type == DataType::kBF16 ? FloatType::bf16 : FloatType::fp32;
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

// Throws std::invalid_argument for shapes that are inconsistent with the attributes or with each other.
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

std::int32_t one_number(const PluginField& field) {
  if (field.data == nullptr || field.length != 1)
    throw std::invalid_argument(std::string("attribute '") + field.name + "' must be one integer");
  if (field.type == PluginFieldType::kINT32)
    return *static_cast<const std::int32_t*>(field.data);
  if (field.type == PluginFieldType::kINT64)
    return static_cast<std::int32_t>(*static_cast<const std::int64_t*>(field.data));
  throw std::invalid_argument(std::string("attribute '") + field.name + "' must be INT32 or INT64");
}

std::vector<std::int32_t> numbers(const PluginField& field) {
  std::vector<std::int32_t> found;
  for (std::int32_t i = 0; i < field.length; ++i)
    if (field.data != nullptr && field.type == PluginFieldType::kINT32)
      found.push_back(static_cast<const std::int32_t*>(field.data)[i]);
    else if (field.data != nullptr && field.type == PluginFieldType::kINT64)
      found.push_back(static_cast<std::int32_t>(static_cast<const std::int64_t*>(field.data)[i]));
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

MsDeformAttnPlugin::MsDeformAttnPlugin(Attributes attributes) : attributes_(std::move(attributes)) {}

nvinfer1::IPluginCapability* MsDeformAttnPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
  case nvinfer1::PluginCapabilityType::kCORE:
    return static_cast<nvinfer1::IPluginV3OneCore*>(this);
  case nvinfer1::PluginCapabilityType::kBUILD:
    return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
  case nvinfer1::PluginCapabilityType::kRUNTIME:
    return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* MsDeformAttnPlugin::clone() noexcept {
  try {
    return new MsDeformAttnPlugin(attributes_);
  } catch (const std::exception& error) {
    report(std::string("clone: ") + error.what());
    return nullptr;
  }
}

std::int32_t MsDeformAttnPlugin::configurePlugin(const DynamicPluginTensorDesc* in, std::int32_t inputs,
                                                 const DynamicPluginTensorDesc* out, std::int32_t outputs) noexcept {
  return guarded("configurePlugin", [&] {
    if (in == nullptr || out == nullptr || inputs != input_count || outputs != 1)
      throw std::invalid_argument("the node has 4 inputs and 1 output; got " + std::to_string(inputs) + " and " +
                                  std::to_string(outputs));
    check_shapes(attributes_,
                 {in[value].desc.dims, in[shapes].desc.dims, in[locations].desc.dims, in[weights].desc.dims});
  });
}

std::int32_t MsDeformAttnPlugin::getOutputDataTypes(DataType* output_types, std::int32_t outputs,
                                                    const DataType* input_types, std::int32_t inputs) const noexcept {
  if (output_types == nullptr || input_types == nullptr || outputs != 1 || inputs != input_count)
    return failed;
  output_types[0] = input_types[value];
  return 0;
}

std::int32_t MsDeformAttnPlugin::getOutputShapes(const nvinfer1::DimsExprs* in, std::int32_t inputs,
                                                 const nvinfer1::DimsExprs*, std::int32_t, nvinfer1::DimsExprs* out,
                                                 std::int32_t outputs, nvinfer1::IExprBuilder& builder) noexcept {
  return guarded("getOutputShapes", [&] {
    if (in == nullptr || out == nullptr || inputs != input_count || outputs != 1 || in[value].nbDims != 4 ||
        in[locations].nbDims != 5)
      throw std::invalid_argument("value must have 4 axes and locations 5, of 4 inputs");
    out[0].nbDims = 3;
    out[0].d[0] = in[value].d[0];
    out[0].d[1] = in[locations].d[1];
    out[0].d[2] = builder.constant(static_cast<std::int64_t>(attributes_.heads) * attributes_.head_dim);
  });
}

bool MsDeformAttnPlugin::supportsFormatCombination(std::int32_t position, const DynamicPluginTensorDesc* tensors,
                                                   std::int32_t inputs, std::int32_t outputs) noexcept {
  if (tensors == nullptr || inputs != input_count || outputs != 1 || position < 0 || position > input_count)
    return false;
  const PluginTensorDesc& tensor = tensors[position].desc;
  if (tensor.format != nvinfer1::TensorFormat::kLINEAR)
    return false;
  switch (position) {
  case value:
    return is_value(tensor.type);
  case shapes:
    return tensor.type == DataType::kINT32 || tensor.type == DataType::kINT64;
  case locations:
    return tensor.type == DataType::kFLOAT; // FP16 would move samples of wide levels by a quarter of a pixel
  case weights:
    return tensor.type == DataType::kFLOAT || tensor.type == tensors[value].desc.type;
  default:
    return tensor.type == tensors[value].desc.type;
  }
}

std::int32_t MsDeformAttnPlugin::onShapeChange(const PluginTensorDesc* in, std::int32_t inputs,
                                               const PluginTensorDesc* out, std::int32_t outputs) noexcept {
  return guarded("onShapeChange", [&] {
    if (in == nullptr || out == nullptr || inputs != input_count || outputs != 1)
      throw std::invalid_argument("the node has 4 inputs and 1 output");
    check_shapes(attributes_, {in[value].dims, in[shapes].dims, in[locations].dims, in[weights].dims});
    if (in[value].dims.d[1] >= kernels::max_tokens)
      throw std::invalid_argument("value has " + std::to_string(in[value].dims.d[1]) + " tokens; at most " +
                                  std::to_string(kernels::max_tokens - 1) + " are possible");
  });
}

std::int32_t MsDeformAttnPlugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out,
                                         const void* const* inputs, void* const* outputs, void*,
                                         cudaStream_t stream) noexcept {
  return guarded("enqueue", [&] {
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
    call.shapes_are_int64 = in[shapes].type == DataType::kINT64;
    call.discrete = attributes_.discrete != 0;
    call.batch = in[value].dims.d[0];
    call.tokens = in[value].dims.d[1];
    call.heads = attributes_.heads;
    call.dim = attributes_.head_dim;
    call.queries = in[locations].dims.d[1];
    call.points = attributes_.points_per_level;
    const cudaError_t status = kernels::ms_deform_attn(call, stream);
    if (status != cudaSuccess)
      throw std::runtime_error(std::string("the kernel was not started: ") + cudaGetErrorString(status));
  });
}

// No state between runs, so every context gets a copy.
nvinfer1::IPluginV3* MsDeformAttnPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
  return clone();
}

const PluginFieldCollection* MsDeformAttnPlugin::getFieldsToSerialize() noexcept {
  const auto made = guarded("getFieldsToSerialize", [&] {
    fields_ = {PluginField("heads", &attributes_.heads, PluginFieldType::kINT32, 1),
               PluginField("head_dim", &attributes_.head_dim, PluginFieldType::kINT32, 1),
               PluginField("points_per_level", attributes_.points_per_level.data(), PluginFieldType::kINT32,
                           static_cast<std::int32_t>(attributes_.points_per_level.size())),
               PluginField("discrete", &attributes_.discrete, PluginFieldType::kINT32, 1)};
    collection_ = {static_cast<std::int32_t>(fields_.size()), fields_.data()};
  });
  return made == 0 ? &collection_ : nullptr;
}

nvinfer1::IPluginV3* MsDeformAttnCreator::createPlugin(const char* name, const PluginFieldCollection* fields,
                                                       nvinfer1::TensorRTPhase) noexcept {
  try {
    if (fields == nullptr || (fields->nbFields > 0 && fields->fields == nullptr))
      throw std::invalid_argument("no attributes were given");
    return new MsDeformAttnPlugin(Attributes::of(*fields));
  } catch (const std::exception& error) {
    report(std::string("the layer '") + (name ? name : "") + "' cannot be made: " + error.what());
    return nullptr;
  }
}

const PluginFieldCollection* MsDeformAttnCreator::getFieldNames() noexcept {
  static const std::array<PluginField, 4> names{PluginField("heads", nullptr, PluginFieldType::kINT32, 1),
                                                PluginField("head_dim", nullptr, PluginFieldType::kINT32, 1),
                                                PluginField("points_per_level", nullptr, PluginFieldType::kINT32, 1),
                                                PluginField("discrete", nullptr, PluginFieldType::kINT32, 1)};
  static const PluginFieldCollection collection{static_cast<std::int32_t>(names.size()), names.data()};
  return &collection;
}

} // namespace detrt::plugin
