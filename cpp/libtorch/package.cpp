#include "package.hpp"

#include <cstring>

#include <dlfcn.h>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include "detrt/error.hpp"
#include "ops.hpp"
#ifdef DETRT_TORCH_GRAPHS
#include "replay.hpp"
#endif

namespace detrt::libtorch {
namespace {

at::ScalarType type_of(DType dtype) {
  switch (dtype) {
  case DType::uint8:
    return at::kByte;
  case DType::int32:
    return at::kInt;
  case DType::int64:
    return at::kLong;
  case DType::float16:
    return at::kHalf;
  case DType::bfloat16:
    return at::kBFloat16;
  case DType::boolean:
    return at::kBool;
  default:
    return at::kFloat;
  }
}

// The first line; a C++ stack trace follows.
std::string first_line(const std::string& text) {
  return text.substr(0, std::min(text.find('\n'), std::size_t{400}));
}

template <class Function> auto guarded(const char* what, Function&& function) -> decltype(function()) {
  try {
    return function();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(ErrorKind::session, std::string("PyTorch failed ") + what + ": " + first_line(error.what()));
  }
}

class AotPackage final : public Package {
public:
  AotPackage(const std::filesystem::path& path, int device, bool tf32)
      : device_(device < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device))),
        tf32_(tf32) {
#ifdef DETRT_TORCH_CUDA
    register_ops();
#endif
    const bool single = device_.is_cuda(); // runs are recorded, which does not allow synchronization
    if (path.extension() == ".so") {       // an unpacked package: the library, and its kernels beside it
      const auto& runners = torch::inductor::getAOTIModelRunnerRegistry();
      const auto runner = runners.find(device < 0 ? "cpu" : "cuda");
      if (runner == runners.end())
        throw Error(ErrorKind::session, "this PyTorch has no runner for " + device_.str());
      runner_ = runner->second(path.string(), 1, device_.str(), path.parent_path().string(), single);
    } else {
      loader_ = std::make_unique<torch::inductor::AOTIModelPackageLoader>(path.string(), "model", single, 1,
                                                                          static_cast<c10::DeviceIndex>(device));
    }
#ifdef DETRT_TORCH_GRAPHS
    if (device_.is_cuda())
      replays_ = std::make_unique<Replays>([this](const auto& given) { return forward(given); }, device_);
#endif
  }

  std::vector<Tensor> run(const std::vector<const Tensor*>& inputs) override {
    return guarded("while it ran the model", [&] {
      const c10::InferenceMode inference;
      if (device_.is_cuda()) {
        at::Context& context = at::globalContext();
        context.setAllowTF32CuBLAS(tf32_); // the default of convolutions is TF32
        context.setAllowTF32CuDNN(tf32_);
        context.setBenchmarkCuDNN(true); // searches for the fastest kernels in the first run of a shape
      }
      std::vector<at::Tensor> given;
      for (const Tensor* tensor : inputs)
        // The model only reads its inputs, so they are not copied for the CPU.
        given.push_back(at::from_blob(const_cast<void*>(tensor->data()), tensor->shape(), type_of(tensor->dtype())));
      std::vector<Tensor> results;
#ifdef DETRT_TORCH_GRAPHS
      if (replays_) {
        for (const at::Tensor& output : replays_->run(given))
          results.push_back(host(output));
        return results;
      }
#endif
      for (at::Tensor& input : given)
        input = input.to(device_);
      for (const at::Tensor& output : forward(given))
        results.push_back(host(output));
      return results;
    });
  }

private:
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) {
    return runner_ ? runner_->run(inputs) : loader_->run(inputs);
  }

  static Tensor host(const at::Tensor& output) {
    const bool whole = !output.is_floating_point();
    const at::Tensor made = output.to(at::kCPU, whole ? at::kLong : at::kFloat).contiguous();
    Tensor tensor(whole ? DType::int64 : DType::float32, made.sizes().vec());
    if (tensor.bytes() > 0)
      std::memcpy(tensor.data(), made.const_data_ptr(), tensor.bytes());
    return tensor;
  }

  at::Device device_;
  bool tf32_;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_; // one of the two
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;
#ifdef DETRT_TORCH_GRAPHS
  std::unique_ptr<Replays> replays_;
#endif
};

} // namespace

std::unique_ptr<Package> open_package(const std::filesystem::path& path, int device, bool tf32) {
  return guarded("to open the package of the bundle", [&] { return std::make_unique<AotPackage>(path, device, tf32); });
}

int gpu_count() {
  return at::hasCUDA() ? at::detail::getCUDAHooks().getNumGPUs() : 0;
}

int compute_capability(int device) {
  if (device < 0 || device >= gpu_count())
    return 0;
  // PyTorch's own function for it is in CUDA headers, which a CPU build does not have; the runtime is loaded already.
  using Attribute = int (*)(int*, int, int);
  const auto attribute = reinterpret_cast<Attribute>(dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute"));
  constexpr int major_attribute = 75, minor_attribute = 76;
  int major = 0, minor = 0;
  if (attribute == nullptr || attribute(&major, major_attribute, device) != 0 ||
      attribute(&minor, minor_attribute, device) != 0)
    return 0;
  return major * 10 + minor;
}

std::string torch_version() {
  return TORCH_VERSION;
}

void set_threads(int threads) {
  at::set_num_threads(threads);
}

} // namespace detrt::libtorch
