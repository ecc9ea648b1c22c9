// The few CUDA objects that sessions need, each owned by one variable. Every status is checked.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include <cuda_runtime_api.h>

#include "detrt/error.hpp"

namespace detrt::gpu {

// Throws Error (session) for anything but success.
inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess)
    return;
  (void)cudaGetLastError(); // so that the next call does not report it again
  const std::string text = std::string(call) + " failed: " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation)
    throw Error(ErrorKind::session,
                "the GPU is out of memory (" + text +
                    "); use a smaller batch or fewer contexts, close other programs on "
                    "the GPU, or build the engine with a smaller max of --batch, --height and --width");
  throw Error(ErrorKind::session, text);
}

// A handle and the function that ends it.
template <class T, cudaError_t (*End)(T)> class Owned {
public:
  Owned() = default;
  explicit Owned(T handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, T{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle_)
      (void)End(handle_);
  }
  T get() const noexcept { return handle_; }
  explicit operator bool() const noexcept { return handle_ != T{}; }

private:
  T handle_{};
};

using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using RunnableGraph = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using DeviceMemory = Owned<void*, cudaFree>;
using PinnedMemory = Owned<void*, cudaFreeHost>;

inline Stream make_stream() {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return Stream(stream);
}

// Time on a stream between two calls.
class StreamTimer {
public:
  void start(cudaStream_t stream) { record(start_, stream); }
  void stop(cudaStream_t stream) { record(stop_, stream); }
  double ms() const { // of the last two, which the caller has waited for
    float passed = 0;
    check(cudaEventElapsedTime(&passed, start_.get(), stop_.get()), "cudaEventElapsedTime");
    return static_cast<double>(passed);
  }

private:
  static void record(Event& event, cudaStream_t stream) {
    if (!event) {
      cudaEvent_t made = nullptr;
      check(cudaEventCreate(&made), "cudaEventCreate");
      event = Event(made);
    }
    check(cudaEventRecord(event.get(), stream), "cudaEventRecord");
  }
  Event start_, stop_;
};

// Device memory with its pinned host copy, grown and reused.
struct Buffer {
  DeviceMemory device;
  PinnedMemory host;
  std::size_t bytes = 0;

  // Room for `wanted` bytes; true where the addresses changed. The content is lost then.
  bool ensure(std::size_t wanted) {
    wanted = wanted ? wanted : 1;
    if (wanted <= bytes)
      return false;
    bytes = 0;
    device = DeviceMemory();
    host = PinnedMemory();
    void* pointer = nullptr;
    check(cudaMalloc(&pointer, wanted), "cudaMalloc");
    device = DeviceMemory(pointer);
    check(cudaMallocHost(&pointer, wanted), "cudaMallocHost");
    host = PinnedMemory(pointer);
    bytes = wanted;
    return true;
  }
};

} // namespace detrt::gpu
