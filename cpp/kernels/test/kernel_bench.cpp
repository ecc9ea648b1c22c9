// Time of one call: kernel_bench [FILE.json [fp16|bf16|fp32]]. Every method is checked against float64 before it is
// timed. `graph_us`: one of 50 calls in a CUDA graph; `event_us`: median of single calls between two events.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "cases.hpp"
#include "device.hpp"

using namespace detrt::kernels;
using namespace detrt::kernels::test;

namespace {

constexpr int in_graph = 50, replays = 40, singles = 200;

float milliseconds(cudaEvent_t begin, cudaEvent_t end) {
  float ms = 0.0f;
  check(cudaEventSynchronize(end), "event");
  check(cudaEventElapsedTime(&ms, begin, end), "event");
  return ms;
}

template <class T> T median(std::vector<T> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

struct Times {
  double graph_us, event_us;
};

Times times_of(const MsDeformAttn& call) {
  cudaStream_t stream;
  cudaEvent_t begin, end;
  cudaGraph_t graph;
  cudaGraphExec_t runnable;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&end), "event");
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < in_graph; ++i)
    check(ms_deform_attn(call, stream), "call");
  check(cudaStreamEndCapture(stream, &graph), "capture");
  check(cudaGraphInstantiateWithFlags(&runnable, graph, 0), "graph");
  std::vector<float> graphs, events;
  for (int i = 0; i < replays; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    check(cudaGraphLaunch(runnable, stream), "graph");
    check(cudaEventRecord(end, stream), "event");
    graphs.push_back(milliseconds(begin, end));
  }
  for (int i = 0; i < singles; ++i) {
    check(cudaEventRecord(begin, stream), "event");
    check(ms_deform_attn(call, stream), "call");
    check(cudaEventRecord(end, stream), "event");
    events.push_back(milliseconds(begin, end));
  }
  cudaGraphExecDestroy(runnable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return {1e3 * static_cast<double>(median(graphs)) / in_graph, 1e3 * static_cast<double>(median(events))};
}

} // namespace

int main(int argc, char** argv) {
  if (!has_gpu()) {
    std::printf("no CUDA device: nothing was run\n");
    return 77;
  }
  std::FILE* json = argc > 1 ? std::fopen(argv[1], "w") : nullptr;
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "device");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "driver");
  if (json)
    std::fprintf(json, "{\"gpu\": \"%s\", \"cuda_runtime\": %d, \"cuda_driver\": %d, \"rows\": [", device.name,
                 CUDART_VERSION, driver);
  const std::vector<std::int64_t> rt_detr{80, 80, 40, 40, 20, 20};
  const std::vector<std::int32_t> four{4, 4, 4, 4}, three{4, 4, 4};
  bool first = true, good = true;
  for (const Places places : {Places::local, Places::uniform})
    for (const Case& c : {Case{"22223 queries, 4 levels", 1, 8, 32, 22223, coco_levels(), four, places},
                          Case{"900 queries, 4 levels", 1, 8, 32, 900, coco_levels(), four, places},
                          Case{"300 queries, 3 levels", 1, 8, 32, 300, rt_detr, three, places}})
      for (const FloatType type : {FloatType::fp16, FloatType::bf16, FloatType::fp32}) {
        if (argc > 2 && std::strcmp(argv[2], name_of(type)) != 0)
          continue;
        const Inputs in = inputs_of(c, type, type, 3);
        const std::vector<double> wanted = reference(c, in);
        const Memory value(bytes_of(in.value, type)), locations(in.locations), weights(bytes_of(in.weights, type)),
            shapes(c.shapes);
        Memory out(static_cast<std::size_t>(c.outputs()) * size_of(type));
        for (const Method method : {Method::tensor_cores, Method::vectors, Method::scalars}) {
          MsDeformAttn call = c.call(type, type);
          call.value = value.data();
          call.shapes = shapes.data();
          call.locations = static_cast<const float*>(locations.data());
          call.weights = weights.data();
          call.out = out.data();
          call.method = method;
          out.fill(0xFF);
          if (ms_deform_attn(call, nullptr) == cudaErrorInvalidValue)
            continue;
          check(cudaDeviceSynchronize(), "run");
          const Error error = error_of(numbers_of(out.read(), type), wanted);
          good = good && error.norm <= allowed(type);
          const Times times = times_of(call);
          static const char* names[] = {"automatic", "tensor_cores", "vectors", "scalars"};
          const char* where = places == Places::local ? "local" : "uniform";
          std::printf("%-24s %-8s %s %-13s %8.2f us in a graph, %8.2f us alone, error %.1e\n", c.name.c_str(), where,
                      name_of(type), names[static_cast<int>(method)], times.graph_us, times.event_us, error.norm);
          std::fflush(stdout);
          if (json)
            std::fprintf(json,
                         "%s\n{\"shape\": \"%s\", \"places\": \"%s\", \"type\": \"%s\", \"method\": \"%s\", "
                         "\"graph_us\": %.3f, \"event_us\": %.3f, \"error\": %.3e}",
                         first ? "" : ",", c.name.c_str(), where, name_of(type), names[static_cast<int>(method)],
                         times.graph_us, times.event_us, error.norm);
          first = false;
        }
      }
  if (json) {
    std::fprintf(json, "\n]}\n");
    std::fclose(json);
  }
  return good ? 0 : 1;
}
