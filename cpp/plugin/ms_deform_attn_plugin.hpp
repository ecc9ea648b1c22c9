// The node `detrt.MSDeformAttn` as a TensorRT layer, for TensorRT 10.x and 11 (TensorRT-RTX has no plugin layers).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

namespace detrt::plugin {

inline constexpr char plugin_name[] = "MSDeformAttn";
inline constexpr char plugin_version[] = "1";
inline constexpr char plugin_namespace[] = "detrt";

// Sends a message to TensorRT's logger, or to standard error if there is none.
void report(const std::string& message) noexcept;

// The attributes of the node; see src/detrt/export/symbolic.py.
struct Attributes {
  std::int32_t heads = 0, head_dim = 0, discrete = 0;
  std::vector<std::int32_t> points_per_level;

  // Throws std::invalid_argument for fields that are missing, of a wrong type or out of range.
  static Attributes of(const nvinfer1::PluginFieldCollection& fields);
};

// Inputs: value (batch, tokens, heads, head_dim) FP32, FP16 or BF16; level sizes (levels, 2) INT32 or INT64; locations
// (batch, queries, heads, points, 2) FP32; weights (batch, queries, heads, points) FP32 or the type of value.
// Output: (batch, queries, heads * head_dim), type of value.
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
