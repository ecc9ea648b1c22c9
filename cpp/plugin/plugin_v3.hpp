// The node `detrt.MSDeformAttn` as a TensorRT layer, for TensorRT 10.x and 11 (TensorRT-RTX has no plugin layers).
#pragma once

#include <vector>

#include "node.hpp"

namespace detrt::plugin {

// See node.hpp for its tensors.
class MsDeformAttnPlugin final : public nvinfer1::IPluginV3,
                                 public nvinfer1::IPluginV3OneCore,
                                 public nvinfer1::IPluginV3OneBuild,
                                 public nvinfer1::IPluginV3OneRuntime {
public:
  explicit MsDeformAttnPlugin(Attributes attributes);

  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  const char* getPluginName() const noexcept override { return plugin_name; }
  const char* getPluginVersion() const noexcept override { return plugin_version; }
  const char* getPluginNamespace() const noexcept override { return plugin_namespace; }

  std::int32_t getNbOutputs() const noexcept override { return 1; }
  std::int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                               const nvinfer1::DynamicPluginTensorDesc* out, std::int32_t outputs) noexcept override;
  std::int32_t getOutputDataTypes(nvinfer1::DataType* output_types, std::int32_t outputs,
                                  const nvinfer1::DataType* input_types, std::int32_t inputs) const noexcept override;
  std::int32_t getOutputShapes(const nvinfer1::DimsExprs* in, std::int32_t inputs,
                               const nvinfer1::DimsExprs* shape_inputs, std::int32_t shape_input_count,
                               nvinfer1::DimsExprs* out, std::int32_t outputs,
                               nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(std::int32_t position, const nvinfer1::DynamicPluginTensorDesc* tensors,
                                 std::int32_t inputs, std::int32_t outputs) noexcept override;

  std::int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                             const nvinfer1::PluginTensorDesc* out, std::int32_t outputs) noexcept override;
  std::int32_t enqueue(const nvinfer1::PluginTensorDesc* in, const nvinfer1::PluginTensorDesc* out,
                       const void* const* inputs, void* const* outputs, void* workspace,
                       cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

private:
  Attributes attributes_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

class MsDeformAttnCreator final : public nvinfer1::IPluginCreatorV3One {
public:
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override;
  const char* getPluginName() const noexcept override { return plugin_name; }
  const char* getPluginVersion() const noexcept override { return plugin_version; }
  const char* getPluginNamespace() const noexcept override { return plugin_namespace; }
};

} // namespace detrt::plugin
