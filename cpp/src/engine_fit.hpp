// Whether an engine of a bundle runs with a TensorRT on a GPU, by its facts in detrt.json: the rule and words of `check_version` and
// `check_gpu` in src/detrt/backends/tensorrt/session.py, which tests/data/engine_refusals.json compares.
#pragma once

#include <string>

#include "detrt/bundle.hpp"

namespace detrt {

// Whether two texts name one release as far as both go: "10.3.0" of the Python package is "10.3.0.26" of the library.
bool same_version(const std::string& a, const std::string& b);
// Why it does not run with a library of its target in this version; empty where it does.
std::string version_refusal(const BundleFile& engine, const std::string& version);
// Why it does not run on a GPU. capability: e.g. 89. gpu: its name.
std::string gpu_refusal(const BundleFile& engine, int capability, const std::string& gpu);

} // namespace detrt
