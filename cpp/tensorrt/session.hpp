// One engine, and the contexts that run it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "detrt/session.hpp"
#include "gpu/image_stage.hpp"
#include "kernels.hpp"
#include "library.hpp"

namespace detrt::tensorrt {

using namespace gpu; // its CUDA objects

// Memory of an output whose shape depends on the data: asked for while the engine runs.
class GrowingOutput final : public nvinfer1::IOutputAllocator {
public:
  explicit GrowingOutput(Buffer& buffer) : buffer_(buffer) {}
#if DETRT_IS_TENSORRT_8
  void* reallocateOutput(const char* name, void* current, std::uint64_t bytes,
                         std::uint64_t alignment) noexcept override;
#else
  void* reallocateOutputAsync(const char* name, void* current, std::uint64_t bytes, std::uint64_t alignment,
                              cudaStream_t stream) noexcept override;
#endif
  void notifyShape(const char* name, const nvinfer1::Dims& dims) noexcept override;
  std::vector<std::int64_t> shape; // of the last run

private:
  void* grow(std::uint64_t bytes) noexcept;
  Buffer& buffer_;
};

// An execution context with its own stream, memory and recorded graph: what one run() uses. Its graph goes before its context.
struct Lane {
  Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() { // a run that failed half-way may still use its memory, and the caller's files
    if (stream)
      (void)cudaStreamSynchronize(stream.get());
  }

  std::unique_ptr<nvinfer1::IExecutionContext> context;
  Stream stream;
  std::map<std::string, Buffer> buffers;
  std::map<std::string, std::unique_ptr<GrowingOutput>> growing;
  std::vector<std::vector<std::int64_t>> shapes; // of the inputs that the context is set to
  std::map<std::string, std::vector<std::int64_t>> output_shapes;
  std::unique_ptr<ImageStage> images;
  StreamTimer forward;
  RunnableGraph graph; // of these shapes and addresses
  int runs = 0;        // with these shapes
};

class TrtSession final : public Session {
public:
  TrtSession(const Bundle& bundle, const BundleFile& file, const SessionOptions& options);
  ~TrtSession() override;

  const std::vector<TensorInfo>& inputs() const override { return inputs_; }
  const std::vector<TensorInfo>& outputs() const override { return outputs_; }
  std::string backend() const override;
  std::optional<std::int64_t> max_batch() const override;
  // TensorRT-RTX prepares kernels for every shape.
  std::int64_t length_step() const override { return DETRT_IS_RTX ? 16 : 1; }
  std::optional<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>
  limits(const std::string& input) const override;
  Tensors run(const Tensors& feeds) override { return run_given(feeds, nullptr); }
  bool takes_images() const override { return resize_on_gpu_; }
  bool decodes_jpegs() const override { return resize_on_gpu_ && has_jpeg_decoder(); }
  Tensors run_images(const BatchPlan& plan, const Tensors& feeds, double threshold, double& forward_ms) override {
    const Images images{plan, threshold, forward_ms};
    return run_given(feeds, &images);
  }

private:
  struct Images { // the arguments of run_images()
    const BatchPlan& plan;
    double threshold;
    double& forward_ms;
  };
  void read_tensors(const EngineFacts& facts);
  std::unique_ptr<Lane> make_lane();
  std::unique_ptr<Lane> take_lane();
  void give_lane(std::unique_ptr<Lane> lane);
  DType native_dtype(const TensorInfo& info) const;
  Tensors run_given(const Tensors& feeds, const Images* images);
  void check_profile(const Layouts& feeds) const;
  void bind(Lane& lane, const Layouts& feeds);
  Tensors answer(Lane& lane, const Images& images);
  void write_images(Lane& lane, const BatchPlan& plan);
  void execute(Lane& lane);
  void record(Lane& lane);
  Tensors download(Lane& lane);
  Tensors run_on(Lane& lane, const Tensors& feeds, const Layouts& layouts, const Images* images);

  std::string path_;
  int device_;
  std::atomic<bool> use_graphs_{false};
  bool needs_graphs_, resize_on_gpu_; // needs_graphs_: the caller asked for them
  ModelSpec spec_; // of the bundle, without a prompt
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::optional<Kernels> kernels_; // of the engine; they outlive its contexts
  std::atomic<int> runs_{0};
  std::vector<TensorInfo> inputs_, outputs_;
  std::set<std::string> narrow_; // tensors that the engine has as INT32 and callers as int64
  std::map<std::string, Profile> profile_;
  std::map<std::string, std::string> environment_; // of the build
  std::vector<std::unique_ptr<Lane>> free_;
  int missing_ = 0; // lanes that failed and are not made again yet
  std::mutex lock_;
  std::condition_variable freed_;
};

} // namespace detrt::tensorrt
