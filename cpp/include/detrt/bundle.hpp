// A bundle: a folder with detrt.json and the files that it lists.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "detrt/spec.hpp"
#include "detrt/tensor.hpp"

namespace detrt {

struct Profile {
  std::vector<std::int64_t> min, opt, max;
};

// What an engine was built for; see EngineFacts in src/detrt/bundle.py.
struct EngineFacts {
  std::string target;                    // "tensorrt-rtx" or "tensorrt"
  std::string runtime_version;          // "1.7.1.116", "10.13.3.9"
  std::vector<int> compute_capabilities; // 86, 89
  std::string precision;
  std::string format; // options.format of a compiled package: "aoti", or "artifact", which only Python opens
  std::vector<std::string> cpu_flags; // of a compiled package: instruction sets that it may use, by Linux's names
  std::string hardware_compatibility = "none"; // "ampere_plus": also for every later GPU
  bool version_compatible = false;             // also for later versions of TensorRT
  std::string performance; // of an OpenVINO model: "latency" or "throughput", or empty
  int streams = 0;         // of an OpenVINO model: batches at a time; 0: its own choice
  std::map<std::string, Profile> profile;  // by input name
  std::map<std::string, std::string> environment; // of the process that built it, and must be of the one that runs it
  std::string compiled_by; // JSON of what decides which kernels TensorRT-RTX compiles for it
  std::vector<TensorInfo> inputs, outputs; // in the order of the graph
};

struct BundleFile {
  std::string kind; // "onnx", "engine", "text", "text-engine", "tokenizer", "inductor", "openvino", "weights", ...
  std::string path; // relative to the bundle
  std::string sha256;
  std::uint64_t size = 0;
  std::optional<EngineFacts> engine;
};

class Bundle {
public:
  // Reads detrt.json; the files are checked when they are used. Throws Error (spec).
  static Bundle open(const std::filesystem::path& folder);
  // The same from the text of detrt.json, for tests and fuzzing. folder: where the files would be.
  static Bundle parse(const std::string& json, const std::filesystem::path& folder);

  const std::filesystem::path& folder() const noexcept { return folder_; }
  const ModelSpec& spec() const noexcept { return spec_; }
  const std::vector<BundleFile>& files() const noexcept { return files_; }
  std::vector<BundleFile> of_kind(const std::string& kind) const;
  // Path of a file after comparing its size and SHA-256 with the manifest, and those of the files that are opened with it: where an
  // ONNX file keeps its values, the weights of an OpenVINO model. Throws Error (spec), also where the manifest does not list one.
  std::filesystem::path checked_path(const BundleFile& file) const;

private:
  std::filesystem::path compared(const BundleFile& file) const;

  std::filesystem::path folder_;
  ModelSpec spec_;
  std::vector<BundleFile> files_;
};

std::string sha256_of(const std::filesystem::path& path); // hex digest of a file's content; throws Error

} // namespace detrt
