// The kernel against float64 on a GPU: kernel_test [--large] [--seed N]. Exit code 1 if a case is wrong, 77 without
// a GPU.
#include <cstdio>
#include <cstring>
#include <string>

#include "cases.hpp"
#include "device.hpp"

using namespace detrt::kernels;
using namespace detrt::kernels::test;

namespace {

int wrong = 0;

void run(const Case& c, FloatType type, FloatType weights_type, Method method, unsigned seed) {
  const Inputs in = inputs_of(c, type, weights_type, seed);
  const std::vector<std::int32_t> narrow(c.shapes.begin(), c.shapes.end());
  const Memory value(bytes_of(in.value, type)), locations(in.locations), weights(bytes_of(in.weights, weights_type));
  const Memory shapes64(c.shapes), shapes32(narrow);
  Memory out(static_cast<std::size_t>(c.outputs()) * size_of(type));
  out.fill(0xFF); // NaN, so that missing writes are detected
  MsDeformAttn call = c.call(type, weights_type);
  call.value = value.data();
  call.shapes = c.shapes64 ? shapes64.data() : shapes32.data();
  call.locations = static_cast<const float*>(locations.data());
  call.weights = weights.data();
  call.out = out.data();
  call.method = method;
  const cudaError_t status = ms_deform_attn(call, nullptr);
  if (method != Method::automatic && status == cudaErrorInvalidValue)
    return; // not supported by this method
  check(status, c.name.c_str());
  check(cudaDeviceSynchronize(), c.name.c_str());
  const Error error = error_of(numbers_of(out.read(), type), reference(c, in));
  const bool good = error.norm <= allowed(type);
  wrong += !good;
  if (!good || method == Method::automatic)
    std::printf("%s %-28s %s, weights %s, method %d: error %.2e (largest %.2e)\n", good ? "ok   " : "WRONG",
                c.name.c_str(), name_of(type), name_of(weights_type), static_cast<int>(method), error.norm,
                error.largest);
}

// Level sizes that do not fit into the tokens must not be read; a level after them contributes zero too.
void run_lies() {
  for (const std::vector<std::int64_t>& lie :
       {std::vector<std::int64_t>{8, 9, 4, 4}, {1 << 30, 1 << 30, 4, 4}, {-3, 4, 4, 4}}) {
    Case c{"sizes that lie", 1, 8, 32, 64, {8, 8, 4, 4}, {4, 4}};
    const Inputs in = inputs_of(c, FloatType::fp16, FloatType::fp16, 5);
    const Memory value(bytes_of(in.value, FloatType::fp16)), locations(in.locations),
        weights(bytes_of(in.weights, FloatType::fp16));
    const Memory shapes(lie);
    Memory out(static_cast<std::size_t>(c.outputs()) * 2);
    for (const Method method : {Method::tensor_cores, Method::vectors, Method::scalars}) {
      out.fill(0xFF);
      MsDeformAttn call = c.call(FloatType::fp16, FloatType::fp16);
      call.value = value.data();
      call.shapes = shapes.data();
      call.locations = static_cast<const float*>(locations.data());
      call.weights = weights.data();
      call.out = out.data();
      call.method = method;
      check(ms_deform_attn(call, nullptr), "sizes that lie");
      check(cudaDeviceSynchronize(), "sizes that lie");
      for (const float x : numbers_of(out.read(), FloatType::fp16))
        if (!std::isfinite(x)) {
          std::printf("WRONG sizes that lie: an output is not finite\n");
          ++wrong;
          return;
        }
    }
  }
  std::printf("ok    sizes that lie\n");
}

} // namespace

int main(int argc, char** argv) {
  unsigned seed = 1;
  bool large = false;
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--large"))
      large = true;
    else if (!std::strcmp(argv[i], "--seed") && i + 1 < argc)
      seed = static_cast<unsigned>(std::stoul(argv[++i]));
  }
  if (!has_gpu()) {
    std::printf("no CUDA device: nothing was run\n");
    return 77;
  }
  std::vector<Case> cases = small_cases();
  if (large) {
    cases.push_back({"encoder of 22 223 tokens", 1, 8, 32, 22223, coco_levels(), {4, 4, 4, 4}, Places::local});
    cases.push_back({"900 queries", 4, 8, 32, 900, coco_levels(), {4, 4, 4, 4}, Places::uniform});
  }
  for (const Case& c : cases)
    for (const FloatType type : {FloatType::fp32, FloatType::fp16, FloatType::bf16})
      for (const FloatType weights : {FloatType::fp32, type}) {
        for (const Method method : {Method::automatic, Method::tensor_cores, Method::vectors, Method::scalars})
          run(c, type, weights, method, seed++);
        if (type == FloatType::fp32)
          break;
      }
  run_lies();
  std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
