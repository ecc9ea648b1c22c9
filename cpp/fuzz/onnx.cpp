// The reader of the names of data files in an ONNX file: any bytes give a result or a detrt::Error.
#include <cstddef>
#include <cstdint>

#include "detrt/error.hpp"
#include "src/data_locations.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    detrt::data_locations({reinterpret_cast<const char*>(data), size}, "model.onnx");
  } catch (const detrt::Error&) {
  }
  return 0;
}
