// Runs of a package as CUDA graphs: one launch instead of one for each kernel.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/Tensor.h>

namespace detrt::libtorch {

// Tensors on the GPU in, tensors on the GPU out.
using Forward = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

class Replays {
public:
  Replays(Forward forward, at::Device device);
  ~Replays();
  // Host tensors in and out; the outputs are valid until the next call. A graph is captured for each shape of the
  // inputs.
  const std::vector<at::Tensor>& run(const std::vector<at::Tensor>& inputs);

private:
  struct Recorded;
  using Shapes = std::vector<std::vector<std::int64_t>>;

  std::unique_ptr<Recorded> record(const std::vector<at::Tensor>& inputs);

  Forward forward_;
  at::Device device_;
  std::map<Shapes, std::unique_ptr<Recorded>> recorded_;
};

} // namespace detrt::libtorch
