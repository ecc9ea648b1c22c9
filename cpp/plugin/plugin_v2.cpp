#include "plugin_v2.hpp"

#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

namespace detrt::plugin {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

namespace {

// In an engine: heads, head_dim, discrete, and the points of each level.
constexpr std::size_t fixed_numbers = 3;

nvinfer1::IPluginV2* made(const char* name, const PluginFieldCollection* fields) noexcept {
  nvinfer1::IPluginV2* plugin = nullptr;
  guarded((std::string("the layer '") + (name ? name : "") + "' cannot be made").c_str(), [&] {
    if (fields == nullptr || (fields->nbFields > 0 && fields->fields == nullptr))
      throw std::invalid_argument("no attributes were given");
    plugin = new MsDeformAttnPlugin(Attributes::of(*fields));
  });
  return plugin;
}

} // namespace

MsDeformAttnPlugin::MsDeformAttnPlugin(Attributes attributes) : attributes_(std::move(attributes)) {}

nvinfer1::IPluginV2DynamicExt* MsDeformAttnPlugin::clone() const noexcept {
  nvinfer1::IPluginV2DynamicExt* copy = nullptr;
  guarded("clone", [&] { copy = new MsDeformAttnPlugin(attributes_); });
  return copy;
}

DimsExprs MsDeformAttnPlugin::getOutputDimensions(std::int32_t output, const DimsExprs* in, std::int32_t inputs,
                                                  nvinfer1::IExprBuilder& builder) noexcept {
  DimsExprs out{};
  out.nbDims = -1; // TensorRT refuses it
  guarded("getOutputDimensions", [&] {
    if (in == nullptr || output != 0 || inputs != input_count || in[value].nbDims != 4 || in[locations].nbDims != 5)
      throw std::invalid_argument("value must have 4 axes and locations 5, of 4 inputs");
    out.nbDims = 3;
    out.d[0] = in[value].d[0];
    out.d[1] = in[locations].d[1];
    out.d[2] = builder.constant(attributes_.heads * attributes_.head_dim);
  });
  return out;
}

bool MsDeformAttnPlugin::supportsFormatCombination(std::int32_t position, const PluginTensorDesc* tensors,
                                                   std::int32_t inputs, std::int32_t outputs) noexcept {
  if (tensors == nullptr || inputs != input_count || outputs != 1 || position < 0 || position > input_count)
    return false;
  return takes(position, tensors[position], tensors[value].type);
}

// This interface cannot refuse here, so `enqueue` checks the shapes of each run.
void MsDeformAttnPlugin::configurePlugin(const DynamicPluginTensorDesc* in, std::int32_t inputs,
                                         const DynamicPluginTensorDesc*, std::int32_t outputs) noexcept {
  guarded("configurePlugin", [&] {
    if (in == nullptr || inputs != input_count || outputs != 1)
      throw std::invalid_argument("the node has 4 inputs and 1 output; got " + std::to_string(inputs) + " and " +
                                  std::to_string(outputs));
    check_shapes(attributes_,
                 {in[value].desc.dims, in[shapes].desc.dims, in[locations].desc.dims, in[weights].desc.dims});
  });
}

std::size_t MsDeformAttnPlugin::getWorkspaceSize(const PluginTensorDesc*, std::int32_t, const PluginTensorDesc*,
                                                 std::int32_t) const noexcept {
  return 0;
}

std::int32_t MsDeformAttnPlugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out,
                                         const void* const* inputs, void* const* outputs, void*,
                                         cudaStream_t stream) noexcept {
  return guarded("enqueue", [&] {
    if (in == nullptr)
      throw std::invalid_argument("TensorRT gave no tensors");
    check_run(attributes_, in);
    start(attributes_, in, out, inputs, outputs, stream);
  });
}

DataType MsDeformAttnPlugin::getOutputDataType(std::int32_t, const DataType* input_types,
                                               std::int32_t inputs) const noexcept {
  return input_types != nullptr && inputs == input_count ? input_types[value] : DataType::kFLOAT;
}

std::size_t MsDeformAttnPlugin::getSerializationSize() const noexcept {
  return (fixed_numbers + attributes_.points_per_level.size()) * sizeof(std::int32_t);
}

void MsDeformAttnPlugin::serialize(void* buffer) const noexcept {
  const std::int32_t numbers[fixed_numbers] = {attributes_.heads, attributes_.head_dim, attributes_.discrete};
  std::memcpy(buffer, numbers, sizeof numbers);
  std::memcpy(static_cast<std::int32_t*>(buffer) + fixed_numbers, attributes_.points_per_level.data(),
              attributes_.points_per_level.size() * sizeof(std::int32_t));
}

nvinfer1::IPluginV2* MsDeformAttnCreator::createPlugin(const char* name, const PluginFieldCollection* fields) noexcept {
  return made(name, fields);
}

nvinfer1::IPluginV2* MsDeformAttnCreator::deserializePlugin(const char* name, const void* data,
                                                            std::size_t length) noexcept {
  nvinfer1::IPluginV2* plugin = nullptr;
  guarded("the layer of the engine cannot be read", [&] {
    const std::size_t count = length / sizeof(std::int32_t);
    if (data == nullptr || length % sizeof(std::int32_t) != 0 || count <= fixed_numbers)
      throw std::invalid_argument("it has " + std::to_string(length) + " bytes");
    std::vector<std::int32_t> numbers(count);
    std::memcpy(numbers.data(), data, length);
    const PluginField fields[] = {{"heads", &numbers[0], PluginFieldType::kINT32, 1},
                                  {"head_dim", &numbers[1], PluginFieldType::kINT32, 1},
                                  {"discrete", &numbers[2], PluginFieldType::kINT32, 1},
                                  {"points_per_level", &numbers[fixed_numbers], PluginFieldType::kINT32,
                                   static_cast<std::int32_t>(count - fixed_numbers)}};
    const PluginFieldCollection collection{4, fields};
    plugin = made(name, &collection);
  });
  return plugin;
}

} // namespace detrt::plugin
