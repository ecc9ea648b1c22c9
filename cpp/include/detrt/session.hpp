// The backend interface: a Session runs a model on host tensors.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "detrt/bundle.hpp"
#include "detrt/tensor.hpp"

namespace detrt {

// Choices of the caller. A backend throws for options that it does not support.
struct SessionOptions {
  std::string backend = "auto";     // or the name of one of backends()
  std::string device = "auto";      // "cpu", "cuda", "cuda:1"; "auto": a GPU if bundle and machine have one
  int threads = 0;                  // of CPU backends; 0: their default
  int contexts = 1;                 // TensorRT: number of concurrent run() calls
  std::optional<bool> cuda_graph;   // TensorRT: record and replay a CUDA graph; default: of engines that take one shape; TensorRT-RTX records itself
  bool resize_on_gpu = true;        // TensorRT: resize images and choose candidates on the GPU; detections are the same
  bool trust_code = false;          // run native code of a bundle that was built elsewhere; see require_trust
  std::vector<std::string> plugins; // shared libraries with TensorRT plugins, loaded before the engine
};

// Throws Error (session) for a file whose native code nobody consented to: not the caller (trust_code), not the environment variable
// DETRT_TRUST_REMOTE_CODE, and this user did not build it on this machine. what: the code, in words. As detrt.models.trust in Python.
void require_trust(const Bundle& bundle, const BundleFile& file, const std::string& what, const SessionOptions& options);

struct BatchPlan; // preprocess.hpp

// Runs one model. run() is thread-safe; calls beyond the limit of the backend wait.
class Session {
public:
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  virtual const std::vector<TensorInfo>& inputs() const = 0; // in the order of the model
  virtual const std::vector<TensorInfo>& outputs() const = 0;
  virtual std::string backend() const = 0;                   // for people: "libtorch-cpu", "tensorrt-rtx-cuda:0", ...
  virtual std::optional<std::int64_t> max_batch() const = 0; // largest batch that the model takes, none = any
  // Lengths of a prompt are padded to a multiple of it (16 for backends that prepare kernels for every shape).
  virtual std::int64_t length_step() const { return 1; }
  // Smallest and largest shape of an input, if the model has limits beyond TensorInfo (the profile of an engine).
  virtual std::optional<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>
  limits(const std::string& /*input*/) const {
    return std::nullopt;
  }

  // Feeds by name, exactly the inputs; the outputs belong to the caller. Throws Error (session).
  virtual Tensors run(const Tensors& feeds) = 0;

  // Whether there is run_images(): the device of the session resizes images, and chooses among the outputs.
  virtual bool takes_images() const { return false; }
  // Whether run_images() decodes the JPEG files of load_encoded() on the device; if not, the CPU does.
  virtual bool decodes_jpegs() const { return false; }
  // As run(), with pixel_values and pixel_mask made from the images of `plan`. feeds: the other inputs. Returns what decode()
  // reads with this threshold. forward_ms: the time of the model alone on the device is added. Throws Error (session).
  virtual Tensors run_images(const BatchPlan& plan, const Tensors& feeds, double threshold, double& forward_ms);

protected:
  Session() = default;
};

// Throws Error for feeds that the session does not take: names, types, ranks, fixed and shared axes.
void check_feeds(const std::vector<TensorInfo>& inputs, const Tensors& feeds);
// The same of the type and shape of each.
using Layouts = std::map<std::string, std::pair<DType, std::vector<std::int64_t>>>;
void check_feeds(const std::vector<TensorInfo>& inputs, const Layouts& feeds);
Layouts layouts_of(const Tensors& feeds);

// -1 for "cpu", the number of a GPU for "cuda" and "cuda:N", nothing for "auto". Throws Error (usage) for anything else.
std::optional<int> device_number(const std::string& device);
// Whether the options have choices for TensorRT, which is then said in `why`.
bool has_tensorrt_choices(const SessionOptions& options, std::string& why);

// A backend. Each is one row in src/backends.cpp, selected when libdetrt is built.
struct Backend {
  const char* name;  // "libtorch", "tensorrt"
  // The file of the bundle to run on this machine and device; nullopt with the reason and the next step in `why`.
  std::optional<BundleFile> (*choose)(const Bundle& bundle, const SessionOptions& options, std::string& why);
  // Opens that file, whose digest has been checked. Throws Error.
  std::unique_ptr<Session> (*open)(const Bundle& bundle, const BundleFile& file, const SessionOptions& options);
};

const std::vector<Backend>& backends(); // compiled in, best first

// Opens the model of a bundle with the first backend that can run it. Throws Error with the reason of every backend.
std::unique_ptr<Session> open_session(const Bundle& bundle, const SessionOptions& options = {});

} // namespace detrt
