// The image readers, the resize and the preprocessing: any bytes give pixels or a detrt::Error.
#include <cstddef>
#include <cstdint>

#include "detrt/error.hpp"
#include "detrt/image.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    constexpr std::int64_t most = 1 << 18; // pixels: a header must not keep the fuzzer busy for seconds
    const detrt::Image image = detrt::decode_image(data, size, "the image", most);
    const auto filter = static_cast<detrt::Resample>(size % 6);
    detrt::resize_image(image, {1 + static_cast<int>(size % 61), 1 + static_cast<int>(size % 53)}, filter);
  } catch (const detrt::Error&) {
  }
  return 0;
}
