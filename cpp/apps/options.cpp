#include "options.hpp"

#include <cerrno>
#include <cstdlib>

#include "detrt/error.hpp"

const char* const help_text =
    "Usage: detrt-run BUNDLE IMAGE... [options]\n"
    "\n"
    "Find objects in images (JPEG, PNG, PNM; folders are searched at any depth) with a bundle of `detrt build`.\n"
    "Without an output option, one line for each image is printed.\n"
    "\n"
    "  -t, --threshold NUMBER   keep scores above it (0.5)\n"
    "      --classes NAMES      keep these classes: names or ids, comma-separated\n"
    "      --prompt FILE        what to find: a file of `detrt encode-prompt`, for models that take a prompt\n"
    "      --max-detections N   keep at most so many in an image\n"
    "      --json FILE          JSON lines to this file; - is stdout\n"
    "      --save DIR           annotated copies into this folder\n"
    "      --batch N            batch size\n"
    "      --size HxW           input size, for models with a dynamic size\n"
    "      --benchmark N        time N runs of one batch after warming up\n"
    "      --backend NAME       auto, or one that was built in\n"
    "      --device NAME        auto, cpu, cuda or cuda:N\n"
    "      --threads N          of backends on the CPU\n"
    "      --contexts N         TensorRT: runs at a time\n"
    "      --cuda-graph         TensorRT: record and replay a CUDA graph\n"
    "      --plugin LIB         TensorRT: library with plugins; may be repeated\n"
    "      --strict             stop at an unreadable image instead of going on\n"
    "  -q, --quiet              no lines\n"
    "  -h, --help, --version\n"
    "\n"
    "Exit code 0: all done; 2: something was wrong, or images were skipped; 1: a bug.\n";

namespace {

[[noreturn]] void fail(const std::string& message) {
  throw detrt::Error(detrt::ErrorKind::usage, message);
}

long whole(const std::string& name, const std::string& text, long low, long high) {
  char* end = nullptr;
  errno = 0;
  const long value = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || errno != 0 || value < low || value > high)
    fail(name + " must be an integer from " + std::to_string(low) + " to " + std::to_string(high) + "; got '" +
         text + "'");
  return value;
}

double number(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 0 && value <= 1))
    fail(name + " must be a number from 0 to 1; got '" + text + "'");
  return value;
}

detrt::Size size_of(const std::string& text) {
  const std::size_t cross = text.find_first_of("xX,");
  const auto side = [&](const std::string& part) { return static_cast<int>(whole("--size", part, 1, 16384)); };
  const int height = side(text.substr(0, cross));
  return {height, cross == std::string::npos ? height : side(text.substr(cross + 1))};
}

std::vector<std::string> names_of(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t end = std::min(text.find(',', start), text.size());
    if (text.find_first_not_of(" \t", start) < end)
      names.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  if (names.empty())
    fail("--classes must be comma-separated class names; got '" + text + "'");
  return names;
}

} // namespace

Options parse_options(int count, char** arguments) {
  Options options;
  std::vector<std::string> given;
  bool only_names = false;
  constexpr long most = 1'000'000;
  for (int i = 1; i < count; ++i) {
    std::string name = arguments[i], value;
    if (only_names || name.size() < 2 || name[0] != '-') {
      given.push_back(name);
      continue;
    }
    if (name == "--") {
      only_names = true;
      continue;
    }
    const std::size_t equals = name.rfind("--", 0) == 0 ? name.find('=') : std::string::npos;
    const bool attached = equals != std::string::npos;
    if (attached) {
      value = name.substr(equals + 1);
      name.resize(equals);
    }
    const auto take = [&]() -> const std::string& {
      if (!attached) {
        if (i + 1 >= count)
          fail(name + " needs a value; see detrt-run --help");
        value = arguments[++i];
      }
      return value;
    };
    auto& detector = options.detector;
    if (name == "-h" || name == "--help")
      options.help = true;
    else if (name == "--version")
      options.version = true;
    else if (name == "-t" || name == "--threshold")
      detector.threshold = number(name, take());
    else if (name == "--classes")
      detector.classes = names_of(take());
    else if (name == "--prompt")
      detector.prompt = take();
    else if (name == "--max-detections")
      detector.max_detections = whole(name, take(), 1, most);
    else if (name == "--json")
      options.json = take();
    else if (name == "--save")
      options.save = take();
    else if (name == "--batch")
      detector.batch = whole(name, take(), 1, most);
    else if (name == "--size")
      detector.size = size_of(take());
    else if (name == "--benchmark")
      options.benchmark = static_cast<int>(whole(name, take(), 1, most));
    else if (name == "--backend")
      detector.session.backend = take();
    else if (name == "--device")
      detector.session.device = take();
    else if (name == "--threads")
      detector.session.threads = static_cast<int>(whole(name, take(), 1, 4096));
    else if (name == "--contexts")
      detector.session.contexts = static_cast<int>(whole(name, take(), 1, 64));
    else if (name == "--cuda-graph")
      detector.session.cuda_graph = true;
    else if (name == "--plugin")
      detector.session.plugins.push_back(take());
    else if (name == "--strict")
      options.strict = true;
    else if (name == "-q" || name == "--quiet")
      options.quiet = true;
    else
      fail("there is no option '" + name + "'; see detrt-run --help");
  }
  if (options.help || options.version)
    return options;
  if (given.size() < 2)
    fail("give a bundle and at least one image; see detrt-run --help");
  options.bundle = given.front();
  options.inputs.assign(given.begin() + 1, given.end());
  return options;
}
