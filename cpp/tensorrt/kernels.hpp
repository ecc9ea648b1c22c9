// Contexts of an engine, with the kernels that TensorRT-RTX compiles for them and the CUDA graphs that it records. Its own headers declare
// the file of kernels and, from 1.3 on, the graphs; the public headers of TensorRT do not, and kernels are compiled at every start with them.
#pragma once

#include <filesystem>
#include <memory>

#include "detrt/error.hpp"
#include "kernel_file.hpp"
#include "library.hpp"

namespace detrt::tensorrt {

#if defined(TRT_MAJOR_RTX)

// Whether the library records graphs itself: libdetrt must not, as kernels are compiled while an engine runs.
#define DETRT_RTX_RECORDS (TRT_MAJOR_RTX > 1 || TRT_MINOR_RTX >= 3)

class Kernels {
public:
  // path: where they are kept; empty: nowhere. graphs: whether the library records what it runs.
  Kernels(nvinfer1::ICudaEngine& engine, std::filesystem::path path, [[maybe_unused]] bool graphs)
      : engine_(engine), path_(std::move(path)), config_(engine.createRuntimeConfig()) {
#if DETRT_RTX_RECORDS
    // As in Python (src/detrt/backends/tensorrt/session.py). Where it is refused, the engine runs without.
    if (config_)
      (void)config_->setCudaGraphStrategy(graphs ? nvinfer1::CudaGraphStrategy::kWHOLE_GRAPH_CAPTURE : nvinfer1::CudaGraphStrategy::kDISABLED);
#endif
    if (path_.empty() || !config_)
      return;
    cache_.reset(config_->createRuntimeCache());
    const std::vector<char> kept = read_kernels(path_);
    // Those of another GPU or version are refused, and written again.
    if (cache_ && !kept.empty() && !cache_->deserialize(kept.data(), kept.size()))
      cache_.reset(config_->createRuntimeCache());
    if (cache_ && !config_->setRuntimeCache(*cache_))
      cache_.reset();
  }
  nvinfer1::IExecutionContext* make_context() const {
    return config_ ? engine_.createExecutionContext(config_.get()) : engine_.createExecutionContext();
  }
  void save() const noexcept {
    const std::unique_ptr<nvinfer1::IHostMemory> kernels(cache_ ? cache_->serialize() : nullptr);
    if (kernels)
      write_kernels(path_, kernels->data(), kernels->size());
  }

private:
  nvinfer1::ICudaEngine& engine_;
  std::filesystem::path path_;
  std::unique_ptr<nvinfer1::IRuntimeConfig> config_; // must outlive its contexts
  std::unique_ptr<nvinfer1::IRuntimeCache> cache_;
};

#else

#define DETRT_RTX_RECORDS 0

class Kernels {
public:
  Kernels(nvinfer1::ICudaEngine& engine, const std::filesystem::path&, bool) : engine_(engine) {}
  nvinfer1::IExecutionContext* make_context() const { return engine_.createExecutionContext(); }
  void save() const noexcept {}

private:
  nvinfer1::ICudaEngine& engine_;
};

#endif

} // namespace detrt::tensorrt
