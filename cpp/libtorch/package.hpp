// A compiled package behind host tensors; only package.cpp and ops.cpp include torch.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "detrt/tensor.hpp"

namespace detrt::libtorch {

class Package {
public:
  virtual ~Package() = default;
  // Tensors in the order of the model; throws Error (session).
  virtual std::vector<Tensor> run(const std::vector<const Tensor*>& inputs) = 0;
};

// device: -1 for the CPU, else the number of a GPU. tf32: let FP32 matmuls on a GPU use TF32. Throws Error (session).
std::unique_ptr<Package> open_package(const std::filesystem::path& path, int device, bool tf32);

int gpu_count();                    // that PyTorch sees; 0 if libtorch was built for the CPU
int compute_capability(int device); // 90 for 9.0; 0 if there is no such GPU
std::string torch_version();
void set_threads(int threads);

} // namespace detrt::libtorch
