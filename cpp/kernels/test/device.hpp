// Device memory for the tests, with every status checked.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime_api.h>

namespace detrt::kernels::test {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
    std::exit(1);
  }
}

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

class Memory {
public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) { check(cudaMalloc(&data_, bytes ? bytes : 1), "cudaMalloc"); }
  template <class T> explicit Memory(const std::vector<T>& content) : Memory(content.size() * sizeof(T)) {
    if (bytes_)
      check(cudaMemcpy(data_, content.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }
  void* data() const { return data_; }
  std::vector<unsigned char> read() const {
    std::vector<unsigned char> bytes(bytes_);
    if (bytes_)
      check(cudaMemcpy(bytes.data(), data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return bytes;
  }
  void fill(int byte) { check(cudaMemset(data_, byte, bytes_ ? bytes_ : 1), "cudaMemset"); }

private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

} // namespace detrt::kernels::test
