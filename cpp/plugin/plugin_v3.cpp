#include "plugin_v3.hpp"

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

namespace detrt::plugin {

using nvinfer1::DataType;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;

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
  return takes(position, tensors[position].desc, tensors[value].desc.type);
}

std::int32_t MsDeformAttnPlugin::onShapeChange(const PluginTensorDesc* in, std::int32_t inputs,
                                               const PluginTensorDesc* out, std::int32_t outputs) noexcept {
  return guarded("onShapeChange", [&] {
    if (in == nullptr || out == nullptr || inputs != input_count || outputs != 1)
      throw std::invalid_argument("the node has 4 inputs and 1 output");
    check_run(attributes_, in);
  });
}

std::int32_t MsDeformAttnPlugin::enqueue(const PluginTensorDesc* in, const PluginTensorDesc* out,
                                         const void* const* inputs, void* const* outputs, void*,
                                         cudaStream_t stream) noexcept {
  return guarded("enqueue", [&] { start(attributes_, in, out, inputs, outputs, stream); });
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
  return &field_names();
}

} // namespace detrt::plugin
