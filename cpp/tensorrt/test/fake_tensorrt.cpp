#include "fake.hpp"

#include <map>
#include <memory>
#include <vector>

#include "tensorrt/library.hpp"
#include "unused.hpp"

using namespace nvinfer1;
using fake::world;
using Guard = std::lock_guard<std::recursive_mutex>;

namespace fake {

float logit_of(const std::uint8_t* pixels, std::size_t size, std::size_t index) {
  return (static_cast<float>(pixels[index * 37 % size]) - 200) / 20;
}

std::string version() {
  return detrt::tensorrt::library_version();
}

namespace {

ILogger* logger;

Dims dims(const std::vector<int>& sides) {
  Dims made{};
  for (const int side : sides)
    made.d[made.nbDims++] = side;
  return made;
}

struct ContextMethods final : unused::VExecutionContext {
  std::shared_ptr<bool> alive = std::make_shared<bool>(true);
  int batch = -1;
  bool changed = true; // since the last run: the next one must not be captured
  std::map<std::string, void*> addresses;
  IOutputAllocator* boxes = nullptr;

  ~ContextMethods() override { *alive = false; }
  std::int32_t getOptimizationProfile() const noexcept override { return 0; }
  bool setInputShape(char const*, Dims const& shape) noexcept override {
    batch = static_cast<int>(shape.d[0]);
    changed = true;
    return true;
  }
  std::int32_t inferShapes(std::int32_t, char const**) noexcept override { return 0; }
  Dims getTensorShape(char const* name) const noexcept override {
    return name == std::string("logits") ? dims({batch, queries, classes}) : dims({batch, world.growing ? -1 : queries, 4});
  }
  bool setTensorAddress(char const* name, void* address) noexcept override {
    addresses[name] = address;
    return true;
  }
  bool setOutputAllocator(char const*, IOutputAllocator* allocator) noexcept override {
    boxes = allocator;
    return true;
  }
  bool enqueueV3(cudaStream_t stream) noexcept override {
    const Guard held(lock);
    if (capturing(stream) && (changed || world.refuse_capture)) {
      refuse_capture(stream);
      logger->log(ILogger::Severity::kERROR, "not while it is captured");
      return false;
    }
    changed = false;
    world.enqueued += !capturing(stream);
    if (boxes) {
      const auto bytes = static_cast<std::uint64_t>(batch) * queries * 4 * sizeof(float);
#if DETRT_IS_TENSORRT_8
      addresses["pred_boxes"] = boxes->reallocateOutput("pred_boxes", nullptr, bytes, 256);
#else
      addresses["pred_boxes"] = boxes->reallocateOutputAsync("pred_boxes", nullptr, bytes, 256, stream);
#endif
      if (!addresses["pred_boxes"])
        return false;
      boxes->notifyShape("pred_boxes", dims({batch, queries, 4}));
    }
    put(stream, [pixels = static_cast<const std::uint8_t*>(addresses.at("pixel_values")),
                 logits = static_cast<float*>(addresses.at("logits")), corners = static_cast<float*>(addresses.at("pred_boxes")),
                 images = static_cast<std::size_t>(batch), there = alive] {
      if (!*there)
        std::abort(); // the context has gone before its run
      for (std::size_t i = 0; i < images * queries * classes; ++i)
        logits[i] = logit_of(pixels, images * 3 * height * width, i);
      for (std::size_t i = 0; i < images * queries * 4; ++i)
        corners[i] = 0.25f + 0.001f * static_cast<float>(i);
    });
    return true;
  }
};

struct EngineMethods final : unused::VCudaEngine {
  static IExecutionContext* context();
  std::int32_t getNbIOTensors() const noexcept override { return 3; }
  char const* getIOTensorName(std::int32_t index) const noexcept override {
    static const char* const names[] = {"pixel_values", "logits", "pred_boxes"};
    return names[index];
  }
  TensorLocation getTensorLocation(char const*) const noexcept override { return TensorLocation::kDEVICE; }
  DataType getTensorDataType(char const* name) const noexcept override {
    return name == std::string("pixel_values") ? DataType::kUINT8 : DataType::kFLOAT;
  }
  Dims getTensorShape(char const* name) const noexcept override {
    const int batch = world.symbolic ? -1 : 2;
    if (name == std::string("pixel_values"))
      return dims({batch, 3, height, width});
    return name == std::string("logits") ? dims({batch, queries, classes}) : dims({batch, world.growing ? -1 : queries, 4});
  }
  TensorIOMode getTensorIOMode(char const* name) const noexcept override {
    return name == std::string("pixel_values") ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
  }
  Dims getProfileShape(char const*, std::int32_t, OptProfileSelector which) const noexcept override {
    return dims({!world.symbolic ? 2 : which == OptProfileSelector::kMIN ? 1 : 4, 3, height, width});
  }
#if DETRT_IS_TENSORRT_8
  IExecutionContext* createExecutionContext() noexcept override { return context(); }
#else
  IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy) noexcept override { return context(); }
#endif
};

struct RuntimeMethods final : unused::VRuntime {
  static ICudaEngine* engine();
#if DETRT_IS_TENSORRT_8
  ICudaEngine* deserializeCudaEngine(void const*, std::size_t, IPluginFactory*) noexcept override { return engine(); }
#else
  ICudaEngine* deserializeCudaEngine(void const*, std::size_t) noexcept override { return engine(); }
#endif
};

// An object of TensorRT, which calls the methods of another one.
template <class Interface, class Methods> struct Object final : Interface {
  Methods methods;
  Object() {
    const Guard held(lock);
    this->mImpl = &methods;
    ++world.alive;
  }
  ~Object() override {
    const Guard held(lock);
    --world.alive;
  }
};

IExecutionContext* EngineMethods::context() {
  const Guard held(lock);
  return fails(world.contexts_until_failure) ? nullptr : new Object<IExecutionContext, ContextMethods>;
}

ICudaEngine* RuntimeMethods::engine() {
  return new Object<ICudaEngine, EngineMethods>;
}

} // namespace
} // namespace fake

extern "C" {

void* createInferRuntime_INTERNAL(void* given, std::int32_t) noexcept {
  fake::logger = static_cast<ILogger*>(given);
  return static_cast<IRuntime*>(new fake::Object<IRuntime, fake::RuntimeMethods>);
}
#if DETRT_IS_TENSORRT_8
std::int32_t getInferLibVersion() noexcept {
  return NV_TENSORRT_MAJOR * 1000 + NV_TENSORRT_MINOR * 100 + NV_TENSORRT_PATCH;
}
#else
std::int32_t getInferLibVersion() noexcept {
  return NV_TENSORRT_MAJOR * 10000 + NV_TENSORRT_MINOR * 100 + NV_TENSORRT_PATCH;
}
std::int32_t getInferLibMajorVersion() noexcept {
  return NV_TENSORRT_MAJOR;
}
std::int32_t getInferLibMinorVersion() noexcept {
  return NV_TENSORRT_MINOR;
}
std::int32_t getInferLibPatchVersion() noexcept {
  return NV_TENSORRT_PATCH;
}
std::int32_t getInferLibBuildVersion() noexcept {
  return NV_TENSORRT_BUILD;
}
IPluginRegistry* getPluginRegistry() noexcept {
  return nullptr;
}
#endif

} // extern "C"
