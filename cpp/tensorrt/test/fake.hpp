// Stand-ins for CUDA and TensorRT that need no GPU. Work on a stream runs when something waits for the stream, or ends it, and freed
// memory is not waited for: a missing wait is a use after free, or an old value.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>

#include <cuda_runtime_api.h>

namespace fake {

constexpr int queries = 6, classes = 3, height = 8, width = 10; // of the model; images are uint8, two or 1 to 4 in a batch

struct World {
  bool symbolic = false, growing = false;                                 // the batch; the boxes have a shape that depends on the data
  bool refuse_capture = false, refuse_graph = false;                      // of enqueueV3, of cudaGraphInstantiate
  int copies_until_failure = -1, allocations_until_failure = -1, contexts_until_failure = -1; // -1: none fails
  int alive = 0;                                                          // streams, graphs, events, memory, engines, contexts
  int enqueued = 0, graphs = 0, launches = 0;                             // runs outside of graphs, graphs made, their launches
};

extern World world;
extern std::recursive_mutex lock; // of all this

bool fails(int& until); // counts down
void put(cudaStream_t stream, std::function<void()> work);
bool capturing(cudaStream_t stream);
void refuse_capture(cudaStream_t stream);

float logit_of(const std::uint8_t* pixels, std::size_t size, std::size_t index);
std::string version(); // of TensorRT

} // namespace fake
