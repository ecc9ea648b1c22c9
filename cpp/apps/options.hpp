// The command line of detrt-run.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "detrt/detector.hpp"

struct Options {
  std::string bundle;
  std::vector<std::string> inputs;
  detrt::DetectorOptions detector;
  std::string json;    // "-": stdout; empty: none
  std::string save;    // folder for annotated copies
  int benchmark = 0;   // timed runs; 0: none
  bool strict = false; // stop at an unreadable image
  bool quiet = false;
  bool decode_on_gpu = false;
};

// Nothing after --help and --version, which are answered here. Throws detrt::Error (usage).
std::optional<Options> parse_options(int count, char** arguments);
