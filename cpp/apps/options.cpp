#include "options.hpp"

#include <cctype>
#include <cstdio>
#include <sstream>

#include <CLI/CLI.hpp>

#include "detrt/detrt.h"
#include "detrt/error.hpp"
#include "detrt/spec.hpp"

namespace {

detrt::Size size_of(const std::string& option, const std::string& text) {
  const auto side = [&](const std::string& part) {
    int value = 0;
    if (!CLI::detail::lexical_cast(part, value) || value < 1 || value > detrt::largest_side)
      throw CLI::ValidationError(option,
                                 "must be HEIGHTxWIDTH or one number, each from 1 to " + std::to_string(detrt::largest_side) +
                                     "; got '" + text + "'");
    return value;
  };
  const std::size_t cross = text.find_first_of("xX,");
  const int height = side(text.substr(0, cross));
  return {height, cross == std::string::npos ? height : side(text.substr(cross + 1))};
}

// CLI11 takes what follows an option as its value: another option, which would be lost, and a file would have its name; and nothing,
// such as a variable of the shell that is not set, as if the option was not there.
void refuse_lost_values(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options([](const CLI::Option* one) { return !one->get_positional(); }))
    for (const std::string& value : option->results())
      if (value.empty())
        throw CLI::ValidationError(option->get_name() + " is '' (empty)", "give a value, or leave the option out");
      else if (value.size() > 1 && value[0] == '-' && (value[1] == '-' || std::isalpha(static_cast<unsigned char>(value[1])) != 0))
        throw CLI::ValidationError(option->get_name() + " has no value",
                                   value + " behind it is spelled like an option; give one between them: " + option->get_name() +
                                       " VALUE " + value + " (a file of that name is ./" + value + ")");
}

} // namespace

std::optional<Options> parse_options(int count, char** arguments) {
  Options options;
  CLI::App app(
      "Find objects in images (JPEG, PNG, PNM; folders are searched at any depth) with a bundle of `detrt build`.\n"
      "Without an output option, one line for each image is printed.",
      "detrt-run");
  app.set_version_flag("--version", std::string("detrt-run ") + detrt_version());
  app.footer("Exit code 0: all done; 2: something was wrong, or images were skipped; 1: a bug.");
  constexpr int most = 1'000'000;
  detrt::DetectorOptions& detector = options.detector;
  app.add_option("BUNDLE", options.bundle, "a bundle")->required();
  app.add_option("IMAGE", options.inputs, "image files and folders")->required();
  app.add_option("-t,--threshold", detector.threshold, "keep scores above it (0.5)")
      ->type_name("NUMBER")
      ->check(CLI::Range(0.0, 1.0));
  std::vector<std::string> classes;
  app.add_option("--classes", classes, "keep these classes: comma-separated names, or ids as id:3; may be repeated")
      ->type_name("NAMES")
      ->allow_extra_args(false);
  app.add_option("--prompt", detector.prompt,
                 "what to find: a file of `detrt encode-prompt`, for models that take a prompt")
      ->type_name("FILE");
  app.add_option("--max-detections", detector.max_detections, "keep at most so many in an image")
      ->type_name("N")
      ->check(CLI::Range(1, most));
  app.add_option("--json", options.json, "JSON lines to this file; - is stdout")->type_name("FILE");
  app.add_option("--save", options.save, "annotated copies into this folder")->type_name("DIR");
  app.add_option("--batch", detector.batch, "batch size")->type_name("N")->check(CLI::Range(1, most));
  app.add_option_function<std::string>(
         "--size", [&](const std::string& text) { detector.size = size_of("--size", text); },
         "input size, for models with a dynamic size")
      ->type_name("HxW");
  std::optional<double> overlap;
  app.add_option_function<std::string>(
         "--tile", [&](const std::string& text) { detector.tiling = detrt::Tiling{size_of("--tile", text)}; },
         "detect in tiles of this size, in pixels of the image, and join what they show")
      ->type_name("HxW");
  app.add_option("--overlap", overlap, "least part of a tile's side that neighbours share (0.2)")
      ->type_name("NUMBER")
      ->check(CLI::Range(0.0, 0.9));
  app.add_option("--benchmark", options.benchmark, "time N runs of one batch after warming up")
      ->type_name("N")
      ->check(CLI::Range(1, most));
  app.add_option("--backend", detector.session.backend, "auto, or one that was built in")->type_name("NAME");
  app.add_option("--device", detector.session.device, "auto, cpu, cuda or cuda:N; of OpenVINO also xpu, xpu:N or npu")->type_name("NAME");
  app.add_option("--threads", detector.session.threads, "of backends on the CPU")
      ->type_name("N")
      ->check(CLI::Range(1, 4096));
  app.add_option("--contexts", detector.session.contexts, "TensorRT: runs at a time")
      ->type_name("N")
      ->check(CLI::Range(1, 64));
  app.add_flag_callback(
      "--cuda-graph", [&] { detector.session.cuda_graph = true; },
      "TensorRT: record and replay a CUDA graph, also where the engine takes several shapes");
  app.add_flag_callback(
      "--no-cuda-graph", [&] { detector.session.cuda_graph = false; }, "TensorRT: run without a CUDA graph");
  app.add_flag_callback(
      "--resize-on-cpu", [&] { detector.session.resize_on_gpu = false; },
      "TensorRT: resize images and choose candidates on the CPU; the GPU does so otherwise");
  app.add_option_function<std::string>(
         "--image-decoder", [&](const std::string& name) { options.decode_on_gpu = name == "gpu"; },
         "what decodes JPEG files: cpu, or with TensorRT gpu (nvJPEG), whose pixels differ by some levels (cpu)")
      ->type_name("NAME")
      ->check(CLI::IsMember({"cpu", "gpu"}));
  app.add_option("--plugin", detector.session.plugins, "TensorRT: library with plugins; may be repeated")
      ->type_name("LIB")
      ->allow_extra_args(false);
  app.add_flag("--trust-remote-code", detector.session.trust_code,
               "run native code of a bundle that was built elsewhere: compiled packages, engines with a runtime of their own");
  app.add_flag("--strict", options.strict, "stop at an unreadable image instead of going on");
  app.add_flag("-q,--quiet", options.quiet, "no lines");
  try {
    app.parse(count, arguments);
    refuse_lost_values(app);
  } catch (const CLI::Success& done) { // --help, --version
    std::ostringstream text; // CLI11 would flush std::cout, which loses why that failed
    app.exit(done, text, text);
    std::fputs(text.str().c_str(), stdout);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw detrt::Error(detrt::ErrorKind::usage, std::string(error.what()) + "; see detrt-run --help");
  }
  if (overlap && !detector.tiling)
    throw detrt::Error(detrt::ErrorKind::usage, "--overlap is of tiles, and there are none; give --tile HxW as well");
  if (overlap)
    detector.tiling->overlap = *overlap;
  for (const std::string& text : classes)
    for (std::string& name : detrt::split_classes(text))
      detector.classes.push_back(std::move(name));
  return options;
}
