#include "fake.hpp"

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "gpu/images.hpp"

using Guard = std::lock_guard<std::recursive_mutex>;
using Work = std::vector<std::function<void()>>;

struct CUstream_st {
  Work waiting, captured;
  bool capturing = false, refused = false;
};
struct CUgraph_st {
  Work work;
};
struct CUgraphExec_st {
  Work work;
};
struct CUevent_st {};

namespace fake {

World world;
std::recursive_mutex lock;

bool fails(int& until) {
  return until >= 0 && until-- == 0;
}

void put(cudaStream_t stream, std::function<void()> work) {
  const Guard held(lock);
  (stream->capturing ? stream->captured : stream->waiting).push_back(std::move(work));
}

bool capturing(cudaStream_t stream) {
  return stream->capturing;
}

void refuse_capture(cudaStream_t stream) {
  stream->refused = true;
}

namespace {

void run(cudaStream_t stream) {
  for (const auto& work : std::exchange(stream->waiting, {}))
    work();
}

template <class T> cudaError_t make(T** handle, T value = {}) {
  const Guard held(lock);
  *handle = new T(std::move(value));
  ++world.alive;
  return cudaSuccess;
}

template <class T> cudaError_t end(T* handle) {
  const Guard held(lock);
  delete handle;
  --world.alive;
  return cudaSuccess;
}

} // namespace
} // namespace fake

using fake::world;

extern "C" {

cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* gpu, int) {
  *gpu = {};
  gpu->major = 9;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "out of memory" : "a fault";
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return fake::make(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Guard held(fake::lock);
  fake::run(stream);
  return fake::end(stream);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const Guard held(fake::lock);
  fake::run(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const Guard held(fake::lock);
  stream->capturing = true;
  stream->refused = false;
  stream->captured.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Guard held(fake::lock);
  stream->capturing = false;
  *graph = nullptr;
  return stream->refused ? cudaErrorStreamCaptureInvalidated : fake::make(graph, {stream->captured});
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
  const Guard held(fake::lock);
  if (world.refuse_graph)
    return cudaErrorMemoryAllocation;
  ++world.graphs;
  return fake::make(runnable, {graph->work});
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
  const Guard held(fake::lock);
  ++world.launches;
  for (const auto& work : runnable->work)
    fake::put(stream, work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return fake::end(graph);
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
  return fake::end(runnable);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return fake::make(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return fake::end(event);
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const Guard held(fake::lock);
  if (fake::fails(world.allocations_until_failure))
    return cudaErrorMemoryAllocation;
  *memory = std::malloc(bytes);
  std::memset(*memory, 0xee, bytes);
  ++world.alive;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  const Guard held(fake::lock);
  std::free(memory);
  --world.alive;
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void** memory, std::size_t bytes) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaFreeHost(void* memory) {
  return cudaFree(memory);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  const Guard held(fake::lock);
  if (fake::fails(world.copies_until_failure))
    return cudaErrorUnknown;
  fake::put(stream, [=] { std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

} // extern "C"

// The kernels of gpu/images.cu, for uint8 pixels and the sigmoid.
namespace detrt::gpu {

cudaError_t write_images(const std::uint8_t* block, std::size_t, const ImageInputs& inputs, cudaStream_t stream) noexcept {
  fake::put(stream, [=] {
    auto* pixels = static_cast<std::uint8_t*>(inputs.pixels);
    for (int i = 0; i < inputs.images; ++i)
      for (int y = 0; y < inputs.height; ++y)
        for (int x = 0; x < inputs.width; ++x) {
          int rgb[3];
          resized_pixel(block, reinterpret_cast<const ImageRow*>(block)[i], y, x, rgb);
          for (int c = 0; c < 3; ++c)
            pixels[((i * 3 + c) * inputs.height + y) * inputs.width + x] = static_cast<std::uint8_t>(rgb[c]);
        }
  });
  return cudaSuccess;
}

cudaError_t choose_queries(const RawOutputs& outputs, bool, float limit, void* chosen, cudaStream_t stream) noexcept {
  fake::put(stream, [=] {
    auto* head = static_cast<ChosenHead*>(chosen);
    *head = {};
    for (int at = 0; at < outputs.images * outputs.queries; ++at) {
      const float* logits = outputs.logits + at * outputs.columns;
      bool wanted = false;
      for (int c = 0; c < outputs.columns; ++c)
        wanted = wanted || logits[c] > limit;
      if (!wanted)
        continue;
      auto* record = reinterpret_cast<ChosenRecord*>(reinterpret_cast<std::uint8_t*>(head + 1) +
                                                     static_cast<std::size_t>(head->count++) * record_bytes(outputs.columns));
      record->image = at / outputs.queries;
      record->query = at % outputs.queries;
      std::memcpy(record->box, outputs.boxes + 4 * at, sizeof record->box);
      std::memcpy(record + 1, logits, sizeof(float) * static_cast<std::size_t>(outputs.columns));
    }
  });
  return cudaSuccess;
}

} // namespace detrt::gpu
