#include "engine_fit.hpp"

#include <algorithm>
#include <sstream>
#include <vector>

namespace detrt {
namespace {

constexpr const char* rtx = "tensorrt-rtx";
constexpr int rtx_capabilities[] = {75, 80, 86, 89, 120, 121}; // that one engine may be built for together

// "10.13.3.9.post1" -> {10, 13, 3, 9}: the leading numbers.
std::vector<int> version_numbers(const std::string& version) {
  std::vector<int> numbers;
  std::istringstream parts(version);
  for (std::string part; std::getline(parts, part, '.');) {
    if (part.empty() || part.size() > 6 || part.find_first_not_of("0123456789") != std::string::npos)
      break;
    numbers.push_back(std::stoi(part));
  }
  return numbers;
}

std::string joined(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers)
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  return text.empty() ? "(none)" : text;
}

} // namespace

bool same_version(const std::string& a, const std::string& b) {
  const std::vector<int> x = version_numbers(a), y = version_numbers(b);
  const std::size_t length = std::min(x.size(), y.size());
  return a == b || (length >= 3 && std::equal(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(length), y.begin()));
}

std::string version_refusal(const BundleFile& engine, const std::string& version) {
  const EngineFacts& facts = engine.engine.value();
  const bool newer = facts.version_compatible && version_numbers(version) >= version_numbers(facts.runtime_version);
  if (newer || same_version(facts.runtime_version, version))
    return "";
  return "'" + engine.path + "' was built with " + (facts.target == rtx ? "TensorRT-RTX " : "TensorRT ") + facts.runtime_version +
         " and runs only on it" + (facts.version_compatible ? " (or newer)" : "") + "; installed: " + version +
         ". Install that version, or build the engine again here: detrt build MODEL -o OUT";
}

std::string gpu_refusal(const BundleFile& engine, int capability, const std::string& gpu) {
  const EngineFacts& facts = engine.engine.value();
  const std::vector<int>& built = facts.compute_capabilities;
  const bool later = facts.hardware_compatibility == "ampere_plus" && capability >= 80;
  if (later || std::find(built.begin(), built.end(), capability) != built.end())
    return "";
  const std::string sm = std::to_string(capability);
  std::string todo = "on this GPU";
  if (facts.target == rtx)
    todo = std::find(std::begin(rtx_capabilities), std::end(rtx_capabilities), capability) != std::end(rtx_capabilities)
               ? "for it with --sm " + sm
               : "on it with --sm current, which TensorRT-RTX may refuse, or with --target tensorrt";
  return "'" + engine.path + "' was built for compute capability " + joined(built) + "; this GPU, " + gpu + ", has " + sm +
         ". Build the engine again " + todo + ", or run the ONNX file: --backend onnxruntime";
}

} // namespace detrt
