// The node `detrt.MSDeformAttn` as a TensorRT layer, for TensorRT 8.5 and 8.6.
#pragma once

#include <cstddef>

#include "node.hpp"

namespace detrt::plugin {

// See node.hpp for its tensors.
class MsDeformAttnPlugin final : public nvinfer1::IPluginV2DynamicExt {
public:
  explicit MsDeformAttnPlugin(Attributes attributes);

  nvinfer1::IPluginV2DynamicExt* clone() const noexcept override;
  nvinfer1::DimsExprs getOutputDimensions(std::int32_t output, const nvinfer1::DimsExprs* in, std::int32_t inputs,
                                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(std::int32_t position, const nvinfer1::PluginTensorDesc* tensors, std::int32_t inputs,
                                 std::int32_t outputs) noexcept override;
  void configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                       const nvinfer1::DynamicPluginTensorDesc* out, std::int32_t outputs) noexcept override;
  std::size_t getWorkspaceSize(const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                               const nvinfer1::PluginTensorDesc* out, std::int32_t outputs) const noexcept override;
  std::int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                       const void* const* inputs, void* const* outputs, void* workspace,
                       cudaStream_t stream) noexcept override;

  nvinfer1::DataType getOutputDataType(std::int32_t output, const nvinfer1::DataType* input_types,
                                       std::int32_t inputs) const noexcept override;
  const char* getPluginType() const noexcept override { return plugin_name; }
  const char* getPluginVersion() const noexcept override { return plugin_version; }
  std::int32_t getNbOutputs() const noexcept override { return 1; }
  std::int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  std::size_t getSerializationSize() const noexcept override;
  void serialize(void* buffer) const noexcept override;
  void destroy() noexcept override { delete this; }
  void setPluginNamespace(const char*) noexcept override {} // it is always `plugin_namespace`
  const char* getPluginNamespace() const noexcept override { return plugin_namespace; }

private:
  Attributes attributes_;
};

class MsDeformAttnCreator final : public nvinfer1::IPluginCreator {
public:
  const char* getPluginName() const noexcept override { return plugin_name; }
  const char* getPluginVersion() const noexcept override { return plugin_version; }
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &field_names(); }
  nvinfer1::IPluginV2* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields) noexcept override;
  nvinfer1::IPluginV2* deserializePlugin(const char* name, const void* data, std::size_t length) noexcept override;
  void setPluginNamespace(const char*) noexcept override {}
  const char* getPluginNamespace() const noexcept override { return plugin_namespace; }
};

} // namespace detrt::plugin
