// The one seam of the runtime: a Session runs a model on host tensors. Back ends implement it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "detrt/bundle.hpp"
#include "detrt/tensor.hpp"

namespace detrt {

// Choices of the caller. A back end refuses what it cannot do instead of ignoring it.
struct SessionOptions {
  std::string backend = "auto";     // or the name of one of backends()
  std::string device = "auto";      // "cpu", "cuda", "cuda:1"; "auto": a GPU where the bundle and the machine have one
  int threads = 0;                  // of CPU back ends; 0: their default
  int contexts = 1;                 // TensorRT: how many run() may be under way at a time
  bool cuda_graph = false;          // record and replay a CUDA graph for every input shape
  std::vector<std::string> plugins; // shared libraries with TensorRT plugins, loaded before the engine
};

// Runs one model. run() may be called from several threads at a time; calls beyond what the back end takes wait.
class Session {
public:
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  virtual const std::vector<TensorInfo>& inputs() const = 0; // in the order of the model
  virtual const std::vector<TensorInfo>& outputs() const = 0;
  virtual std::string backend() const = 0; // what ran, for people: "libtorch-cpu", "tensorrt-rtx-cuda:0", ...
  virtual std::optional<std::int64_t> max_batch() const = 0; // largest batch that the model takes, none = any
  // Lengths of a prompt are padded up to a multiple of it (a back end that prepares kernels for every shape wants 16).
  virtual std::int64_t length_step() const { return 1; }
  // Smallest and largest shape of an input, where the model is limited beyond TensorInfo (an engine's profile).
  virtual std::optional<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>
  limits(const std::string& /*input*/) const {
    return std::nullopt;
  }

  // Feeds by name, exactly the inputs; the outputs belong to the caller. Throws Error (session).
  virtual Tensors run(const Tensors& feeds) = 0;

protected:
  Session() = default;
};

// Throws Error where feeds are not what the session takes: names, types, ranks, fixed and shared axes.
void check_feeds(const std::vector<TensorInfo>& inputs, const Tensors& feeds);

// What a back end tells about itself. Each is one row in src/backends.cpp, chosen when libdetrt is built.
struct Backend {
  const char* name;  // "libtorch", "tensorrt"
  const char* needs; // what a bundle must hold for it, and how to build that
  // The file of the bundle that it would run on this machine and device; nullopt with the reason in `why`.
  std::optional<BundleFile> (*choose)(const Bundle& bundle, const SessionOptions& options, std::string& why);
  // Opens that file after its digest was compared. Throws Error.
  std::unique_ptr<Session> (*open)(const Bundle& bundle, const BundleFile& file, const SessionOptions& options);
};

const std::vector<Backend>& backends(); // those that were built in, best first

// Opens the model of a bundle with the best back end that can. Throws Error with the reason of every back end.
std::unique_ptr<Session> open_session(const Bundle& bundle, const SessionOptions& options = {});

} // namespace detrt
