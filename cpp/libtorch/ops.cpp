#include "ops.hpp"

#include <mutex>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/cudnn_convolution_add_relu.h>
#include <ATen/ops/cudnn_convolution_relu.h>
#include <torch/library.h>

// The same as in src/detrt/backends/inductor/kernels.py, where Python registers them.
namespace detrt::libtorch {
namespace {

constexpr auto last = at::MemoryFormat::ChannelsLast;

at::Tensor linear_relu(const at::Tensor& data, const at::Tensor& weight, const at::Tensor& bias) {
  const at::Tensor rows = data.reshape({-1, data.size(-1)});
  std::vector<std::int64_t> shape = data.sizes().vec();
  shape.back() = weight.size(0);
  return at::_addmm_activation(bias, rows, weight.t()).view(shape);
}

at::Tensor conv_relu(const at::Tensor& data, const at::Tensor& weight, const at::Tensor& bias,
                     const std::optional<at::Tensor>& residual, at::IntArrayRef stride, at::IntArrayRef padding,
                     at::IntArrayRef dilation, std::int64_t groups) {
  const at::Tensor pixels = data.contiguous(last), kernel = weight.contiguous(last);
  if (!residual.has_value())
    return at::cudnn_convolution_relu(pixels, kernel, bias, stride, padding, dilation, groups).contiguous(last);
  return at::cudnn_convolution_add_relu(pixels, kernel, residual->contiguous(last), at::Scalar(1.0), bias, stride,
                                        padding, dilation, groups)
      .contiguous(last);
}

} // namespace

void register_ops() {
  static std::once_flag once;
  std::call_once(once, [] {
    // In a Python process detrt may have defined them.
    if (c10::Dispatcher::singleton().findSchema({"detrt::linear_relu", ""}).has_value())
      return;
    static torch::Library library(torch::Library::FRAGMENT, "detrt", std::nullopt, __FILE__, __LINE__);
    library.def("linear_relu(Tensor data, Tensor weight, Tensor bias) -> Tensor");
    library.def("conv_relu(Tensor data, Tensor weight, Tensor bias, Tensor? residual, int[] stride, int[] padding, "
                "int[] dilation, int groups) -> Tensor");
    library.impl("linear_relu", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(linear_relu)));
    library.impl("conv_relu", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(conv_relu)));
  });
}

} // namespace detrt::libtorch
