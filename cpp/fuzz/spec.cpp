// The readers of detrt.json and of prompt files: any bytes give a result or a detrt::Error.
#include <cstddef>
#include <cstdint>
#include <string>

#include "detrt/bundle.hpp"
#include "detrt/error.hpp"
#include "detrt/prompt.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  // A manifest, or a manifest and a prompt of it with a zero between.
  const std::size_t cut = text.find('\0');
  try {
    const detrt::Bundle bundle = detrt::Bundle::parse(text.substr(0, cut), "bundle");
    if (cut != std::string::npos)
      detrt::Prompt::parse(text.substr(cut + 1), "prompt", bundle);
  } catch (const detrt::Error&) {
  }
  return 0;
}
