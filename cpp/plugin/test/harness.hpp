// What the harnesses of both plugin interfaces need.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <NvInferRuntime.h>

#include "test/cases.hpp"
#include "test/device.hpp"

namespace detrt::plugin::test {

using namespace detrt::kernels;
using namespace detrt::kernels::test;
using namespace nvinfer1;

using Extent = std::remove_reference_t<decltype(Dims{}.d[0])>;

inline int checks = 0, wrong = 0;

inline void expect(bool good, const std::string& what) {
  ++checks;
  if (!good) {
    ++wrong;
    std::printf("WRONG %s\n", what.c_str());
  }
}

// A length that is known, or a symbol: what TensorRT hands to getOutputShapes.
class Length final : public IDimensionExpr {
public:
  explicit Length(Extent known) : impl_(known) { mImpl = &impl_; }
  ~Length() noexcept override = default;
  Extent value() const { return impl_.known; }

private:
  struct Impl final : apiv::VDimensionExpr {
    explicit Impl(Extent number) : known(number) {}
    bool isConstant() const noexcept override { return known >= 0; }
    Extent getConstantValue() const noexcept override { return known; }
#if NV_TENSORRT_MAJOR >= 10
    bool isSizeTensor() const noexcept override { return false; }
#endif
    Extent known;
  } impl_;
};

class Builder final : public IExprBuilder {
public:
  Builder() { mImpl = &impl_; }
  ~Builder() noexcept override = default;

private:
  struct Impl final : apiv::VExprBuilder {
    const IDimensionExpr* constant(Extent number) noexcept override {
      made.push_back(std::make_unique<Length>(number));
      return made.back().get();
    }
    const IDimensionExpr* operation(DimensionOperation, const IDimensionExpr&,
                                    const IDimensionExpr&) noexcept override {
      return nullptr;
    }
#if NV_TENSORRT_MAJOR >= 10
    const IDimensionExpr* declareSizeTensor(std::int32_t, const IDimensionExpr&,
                                            const IDimensionExpr&) noexcept override {
      return nullptr;
    }
#endif
    std::vector<std::unique_ptr<Length>> made;
  } impl_;
};

inline PluginTensorDesc tensor(DataType type, std::initializer_list<std::int64_t> shape) {
  PluginTensorDesc desc{};
  desc.type = type;
  desc.format = TensorFormat::kLINEAR;
  desc.dims.nbDims = static_cast<std::int32_t>(shape.size());
  std::int32_t axis = 0;
  for (const std::int64_t length : shape)
    desc.dims.d[axis++] = static_cast<Extent>(length);
  return desc;
}

struct Tensors {
  std::vector<PluginTensorDesc> in, out;
#if NV_TENSORRT_MAJOR >= 10
  std::vector<DynamicPluginTensorDesc> dynamic() const {
    std::vector<DynamicPluginTensorDesc> all;
    for (const auto* part : {&in, &out})
      for (const PluginTensorDesc& desc : *part)
        all.push_back({desc, desc.dims, desc.dims, desc.dims});
    return all;
  }
#else
  std::vector<PluginTensorDesc> all() const {
    std::vector<PluginTensorDesc> both = in;
    both.insert(both.end(), out.begin(), out.end());
    return both;
  }
#endif
};

inline DataType type_of(FloatType type) {
#if NV_TENSORRT_MAJOR >= 10
  if (type == FloatType::bf16)
    return DataType::kBF16;
#endif
  return type == FloatType::fp32 ? DataType::kFLOAT : DataType::kHALF;
}

// TensorRT 8 has no INT64.
inline DataType level_type([[maybe_unused]] const Case& c) {
#if NV_TENSORRT_MAJOR >= 10
  if (c.shapes64)
    return DataType::kINT64;
#endif
  return DataType::kINT32;
}

inline Tensors tensors_of(const Case& c, FloatType type, FloatType weights_type, std::int64_t batch,
                          std::int64_t tokens, std::int64_t queries) {
  const std::int64_t points = c.all_points();
  return {{tensor(type_of(type), {batch, tokens, c.heads, c.dim}),
           tensor(level_type(c), {static_cast<std::int64_t>(c.points.size()), 2}),
           tensor(DataType::kFLOAT, {batch, queries, c.heads, points, 2}),
           tensor(type_of(weights_type), {batch, queries, c.heads, points})},
          {tensor(type_of(type), {batch, queries, c.heads * c.dim})}};
}

// Runs enqueue(inputs, outputs, stream), which answers 0, on the GPU and compares the output with float64.
template <class Enqueue>
void run_on_gpu(const Case& c, FloatType type, FloatType weights_type, unsigned seed, Enqueue&& enqueue) {
  const Inputs in = inputs_of(c, type, weights_type, seed);
  const std::vector<std::int32_t> narrow(c.shapes.begin(), c.shapes.end());
  const Memory value(bytes_of(in.value, type)), locations(in.locations), weights(bytes_of(in.weights, weights_type));
  const Memory shapes64(c.shapes), shapes32(narrow);
  Memory out(static_cast<std::size_t>(c.outputs()) * size_of(type));
  out.fill(0xFF);
  const bool narrowed = level_type(c) == DataType::kINT32;
  const void* inputs[] = {value.data(), narrowed ? shapes32.data() : shapes64.data(), locations.data(), weights.data()};
  void* outputs[] = {out.data()};
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  check(cudaDeviceSynchronize(), "copies");
  enqueue(inputs, outputs, stream);
  check(cudaStreamSynchronize(stream), c.name.c_str());
  check(cudaStreamDestroy(stream), "stream");
  const Error error = error_of(numbers_of(out.read(), type), reference(c, in));
  expect(error.norm <= allowed(type), c.name + ": error " + std::to_string(error.norm));
  std::printf("%-28s %s, weights %s: error %.2e (largest %.2e)\n", c.name.c_str(), name_of(type), name_of(weights_type),
              error.norm, error.largest);
}

} // namespace detrt::plugin::test
