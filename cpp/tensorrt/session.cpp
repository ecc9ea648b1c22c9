#include "session.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>

namespace detrt::tensorrt {
namespace {

// Kernels of the usual shapes are compiled by then, and a server may be killed later.
constexpr int runs_before_saving = 50;
constexpr const char *pixel_values = "pixel_values", *pixel_mask = "pixel_mask";

// TensorRT stays on the device of the thread that calls it.
void use(int device) {
  check(cudaSetDevice(device), "cudaSetDevice");
}

std::vector<std::int64_t> shape_of(const nvinfer1::Dims& dims) {
  return {dims.d, dims.d + std::max<std::int32_t>(dims.nbDims, 0)};
}

DType dtype_of_type(nvinfer1::DataType type, const std::string& name) {
  switch (type) {
  case nvinfer1::DataType::kFLOAT:
    return DType::float32;
  case nvinfer1::DataType::kHALF:
    return DType::float16;
  case nvinfer1::DataType::kINT32:
    return DType::int32;
#if !DETRT_IS_TENSORRT_8
  case nvinfer1::DataType::kBF16:
    return DType::bfloat16;
  case nvinfer1::DataType::kINT64:
    return DType::int64;
#endif
  case nvinfer1::DataType::kUINT8:
    return DType::uint8;
  case nvinfer1::DataType::kBOOL:
    return DType::boolean;
  default:
    throw Error(ErrorKind::session, "tensor '" + name +
                                        "' of the engine has a type that libdetrt does not know; export the model with "
                                        "float32 or float16 inputs and outputs");
  }
}

// Integers of one width as integers of another.
template <class From, class To> void copy_values(const void* from, void* to, std::size_t count) {
  const From* source = static_cast<const From*>(from);
  std::transform(source, source + count, static_cast<To*>(to), [](From value) { return static_cast<To>(value); });
}

std::size_t bytes_of(const std::vector<std::int64_t>& shape, DType dtype) {
  std::size_t bytes = size_of(dtype);
  for (const std::int64_t length : shape)
    bytes *= static_cast<std::size_t>(length);
  return bytes;
}

} // namespace

#if DETRT_IS_TENSORRT_8
void* GrowingOutput::reallocateOutput(const char*, void*, std::uint64_t bytes, std::uint64_t) noexcept {
  return grow(bytes);
}
#else
void* GrowingOutput::reallocateOutputAsync(const char*, void*, std::uint64_t bytes, std::uint64_t,
                                           cudaStream_t) noexcept {
  return grow(bytes);
}
#endif

void* GrowingOutput::grow(std::uint64_t bytes) noexcept {
  try {
    buffer_.ensure(static_cast<std::size_t>(bytes));
    return buffer_.device.get();
  } catch (...) { // TensorRT reports the missing memory
    return nullptr;
  }
}

void GrowingOutput::notifyShape(const char*, const nvinfer1::Dims& dims) noexcept {
  try {
    shape = shape_of(dims);
  } catch (...) {
    shape.clear();
  }
}

TrtSession::TrtSession(const Bundle& bundle, const BundleFile& file, const SessionOptions& options)
    : path_(file.path), device_(device_of(options.device).value_or(0)), needs_graphs_(options.cuda_graph.value_or(false)),
      resize_on_gpu_(options.resize_on_gpu), spec_(bundle.spec()) {
  if (DETRT_IS_RTX && !DETRT_RTX_RECORDS && needs_graphs_)
    throw Error(ErrorKind::usage,
                "TensorRT-RTX compiles kernels while it runs, which a recorded CUDA graph would not see; leave --cuda-graph "
                "out for this engine");
  if (options.contexts < 1 || options.contexts > 64)
    throw Error(ErrorKind::usage, "contexts must be from 1 to 64; got " + std::to_string(options.contexts));
  if (const std::string why = refusal(file, device_); !why.empty())
    throw Error(ErrorKind::session, why);
  const std::filesystem::path path = bundle.checked_path(file); // what cannot run here is not read
  use(device_);
  load_plugins(options.plugins);
  runtime_ = make_runtime();
  if (file.engine->version_compatible)
    require_trust(bundle, file, "TensorRT's own runtime code", options);
  engine_ = open_engine(*runtime_, path, file.engine->version_compatible);
  environment_ = file.engine->environment;
  cudaDeviceProp gpu{};
  check(cudaGetDeviceProperties(&gpu, device_), "cudaGetDeviceProperties");
  kernels_.emplace(*engine_, kernel_file(file, gpu.name), options.cuda_graph.value_or(true));
  read_tensors(*file.engine);
  const bool symbolic = std::any_of(profile_.begin(), profile_.end(),
                                    [](const auto& row) { return row.second.min != row.second.max; });
  // A second context that takes the only profile of such an engine crashes the process.
  if (DETRT_IS_TENSORRT_8 && symbolic && options.contexts > 1)
    throw Error(ErrorKind::usage, "with TensorRT " + library_version() + " an engine of symbolic shapes has one context; got " +
                                      std::to_string(options.contexts) +
                                      " contexts; leave the option out, or build the engine with a fixed --batch");
  use_graphs_ = !DETRT_IS_RTX && options.cuda_graph.value_or(!symbolic);
  for (int i = 0; i < options.contexts; ++i)
    free_.push_back(make_lane());
}

TrtSession::~TrtSession() {
  (void)cudaSetDevice(device_);
  if (kernels_)
    kernels_->save();
  free_.clear(); // contexts before their engine
}

std::string TrtSession::backend() const {
  return std::string(target) + "-cuda:" + std::to_string(device_);
}

// From the engine, not from its facts: those give the names of symbolic axes.
void TrtSession::read_tensors(const EngineFacts& facts) {
  for (std::int32_t i = 0; i < engine_->getNbIOTensors(); ++i) {
    const std::string name = engine_->getIOTensorName(i);
    if (engine_->getTensorLocation(name.c_str()) == nvinfer1::TensorLocation::kHOST)
      throw Error(ErrorKind::session, "tensor '" + name + "' of '" + path_ +
                                          "' lies in host memory (its values are shapes), which libdetrt "
                                          "does not support; export the model with detrt export");
    TensorInfo info{name,
                    dtype_of_type(engine_->getTensorDataType(name.c_str()), name),
                    shape_of(engine_->getTensorShape(name.c_str())),
                    {}};
    const bool input = engine_->getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kINPUT;
    for (const TensorInfo& told : input ? facts.inputs : facts.outputs)
      if (told.name == name && told.shape.size() == info.shape.size()) {
        info.axes = told.axes;
        if (told.dtype == DType::int64 && info.dtype == DType::int32) {
          narrow_.insert(name);
          info.dtype = DType::int64;
        }
      }
    if (input) {
      using Selector = nvinfer1::OptProfileSelector;
      const auto at = [&](Selector which) { return shape_of(engine_->getProfileShape(name.c_str(), 0, which)); };
      profile_[name] = Profile{at(Selector::kMIN), at(Selector::kOPT), at(Selector::kMAX)};
    }
    (input ? inputs_ : outputs_).push_back(std::move(info));
  }
}

DType TrtSession::native_dtype(const TensorInfo& info) const {
  return narrow_.count(info.name) ? DType::int32 : info.dtype;
}

std::optional<std::int64_t> TrtSession::max_batch() const {
  std::optional<std::int64_t> most;
  for (const auto& [name, range] : profile_)
    if (!range.max.empty())
      most = std::min(most.value_or(std::numeric_limits<std::int64_t>::max()), range.max.front());
  return most;
}

std::optional<std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>>>
TrtSession::limits(const std::string& input) const {
  const auto row = profile_.find(input);
  if (row == profile_.end())
    return std::nullopt;
  return std::pair(row->second.min, row->second.max);
}

namespace {

// The environment that a TensorRT-RTX engine was built in, while a context is made: `environment_of` in
// src/detrt/backends/tensorrt/bindings.py says why.
class InEnvironment {
public:
  explicit InEnvironment(const std::map<std::string, std::string>& environment) : held_(lock()) {
    const char* now = std::getenv(name);
    if (const auto row = environment.find(name); row != environment.end()) {
      setenv(name, row->second.c_str(), 1);
    } else if (DETRT_IS_RTX && now != nullptr) {
      before_ = now;
      unsetenv(name);
    }
  }
  ~InEnvironment() {
    if (before_)
      setenv(name, before_->c_str(), 1);
  }
  InEnvironment(const InEnvironment&) = delete;
  InEnvironment& operator=(const InEnvironment&) = delete;

private:
  static constexpr const char* name = "NVIDIA_TF32_OVERRIDE";
  static std::mutex& lock() {
    static std::mutex only;
    return only;
  }
  std::lock_guard<std::mutex> held_;
  std::optional<std::string> before_;
};

} // namespace

std::unique_ptr<Lane> TrtSession::make_lane() {
  auto lane = std::make_unique<Lane>();
  lane->stream = make_stream();
  {
    const InEnvironment held(environment_);
    lane->context.reset(kernels_->make_context());
  }
  if (!lane->context)
    throw Error(ErrorKind::session,
                "TensorRT could not prepare '" + path_ + "' for running (" + Logger::instance().taken() +
                    "), most likely for lack of GPU memory; use fewer contexts, or build it with a smaller max of "
                    "--batch, --height and --width");
  // Only the first context of an engine has the profile from the start.
  if (lane->context->getOptimizationProfile() != 0 &&
      !lane->context->setOptimizationProfileAsync(0, lane->stream.get()))
    throw Error(ErrorKind::session, "TensorRT refused the profile of '" + path_ + "': " + Logger::instance().taken());
  return lane;
}

std::unique_ptr<Lane> TrtSession::take_lane() {
  std::unique_lock<std::mutex> held(lock_);
  freed_.wait(held, [&] { return !free_.empty() || missing_ > 0; });
  if (free_.empty()) {
    --missing_;
    held.unlock();
    try {
      return make_lane();
    } catch (...) {
      give_lane(nullptr);
      throw;
    }
  }
  std::unique_ptr<Lane> lane = std::move(free_.back());
  free_.pop_back();
  return lane;
}

void TrtSession::give_lane(std::unique_ptr<Lane> lane) {
  {
    const std::lock_guard<std::mutex> held(lock_);
    if (lane)
      free_.push_back(std::move(lane));
    else
      ++missing_;
  }
  freed_.notify_one();
}

Tensors TrtSession::run_given(const Tensors& feeds, const Images* images) {
  Layouts layouts = layouts_of(feeds);
  if (images) {
    const auto count = static_cast<std::int64_t>(images->plan.images.size());
    const std::int64_t height = images->plan.canvas.height, width = images->plan.canvas.width;
    layouts[pixel_values] = {spec_.input.float_pixels ? DType::float32 : DType::uint8, {count, 3, height, width}};
    if (spec_.input.mask)
      layouts[pixel_mask] = {DType::int64, {count, height, width}};
  }
  check_feeds(inputs_, layouts);
  check_profile(layouts);
  use(device_);
  std::unique_ptr<Lane> lane = take_lane();
  try {
    Tensors outputs = run_on(*lane, feeds, layouts, images);
    if (++runs_ == runs_before_saving)
      kernels_->save();
    give_lane(std::move(lane));
    return outputs;
  } catch (...) {
    // In no state that a later run may rely on: it is made again when it is needed.
    lane.reset();
    give_lane(nullptr);
    throw;
  }
}

void TrtSession::check_profile(const Layouts& feeds) const {
  for (const auto& [name, range] : profile_) {
    const std::vector<std::int64_t>& shape = feeds.at(name).second;
    for (std::size_t i = 0; i < shape.size() && i < range.min.size(); ++i)
      if (shape[i] < range.min[i] || shape[i] > range.max[i])
        throw Error(ErrorKind::session, "input '" + name + "' has shape " + shape_text(shape) + "; '" + path_ +
                                            "' takes from " + shape_text(range.min) + " to " + shape_text(range.max) +
                                            "; use a smaller --batch, or build the engine for more");
  }
}

Tensors TrtSession::run_on(Lane& lane, const Tensors& feeds, const Layouts& layouts, const Images* images) {
  bind(lane, layouts);
  for (const TensorInfo& info : inputs_) {
    const auto found = feeds.find(info.name);
    if (found == feeds.end() || found->second.bytes() == 0) // made from images, or empty
      continue;
    const Tensor& tensor = found->second;
    Buffer& buffer = lane.buffers.at(info.name);
    const std::size_t bytes = bytes_of(tensor.shape(), native_dtype(info));
    if (narrow_.count(info.name))
      copy_values<std::int64_t, std::int32_t>(tensor.data(), buffer.host.get(), tensor.bytes() / sizeof(std::int64_t));
    else
      std::memcpy(buffer.host.get(), tensor.data(), bytes);
    check(cudaMemcpyAsync(buffer.device.get(), buffer.host.get(), bytes, cudaMemcpyHostToDevice, lane.stream.get()),
          "the copy to the GPU");
  }
  if (images) {
    write_images(lane, images->plan);
    lane.forward.start(lane.stream.get());
  }
  execute(lane);
  ++lane.runs;
  if (!images)
    return download(lane);
  lane.forward.stop(lane.stream.get());
  Tensors outputs = answer(lane, *images);
  images->forward_ms += lane.forward.ms();
  return outputs;
}

// The outputs, or what is chosen of them.
Tensors TrtSession::answer(Lane& lane, const Images& images) {
  if (!lane.growing.empty() || !can_choose(spec_, outputs_))
    return download(lane);
  const auto output = [&](const char* name) { return static_cast<const float*>(lane.buffers.at(name).device.get()); };
  const std::vector<std::int64_t>& shape = lane.output_shapes.at("logits");
  const auto side = [&](std::size_t axis) { return static_cast<std::int32_t>(shape.at(axis)); };
  lane.images->choose({output("logits"), output("pred_boxes"), side(0), side(1), side(2)},
                      static_cast<float>(images.threshold), lane.stream.get());
  return lane.images->chosen(lane.stream.get());
}

void TrtSession::write_images(Lane& lane, const BatchPlan& plan) {
  if (!lane.images)
    lane.images = std::make_unique<ImageStage>(spec_);
  ImageInputs inputs;
  inputs.pixels = lane.buffers.at(pixel_values).device.get();
  if (spec_.input.mask)
    inputs.mask = lane.buffers.at(pixel_mask).device.get();
  inputs.int32_mask = narrow_.count(pixel_mask) > 0;
  lane.images->write(plan, inputs, lane.stream.get());
}

// Returns the context its shapes and addresses, where they are not set already.
void TrtSession::bind(Lane& lane, const Layouts& feeds) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (const TensorInfo& info : inputs_)
    shapes.push_back(feeds.at(info.name).second);
  if (lane.runs > 0 && shapes == lane.shapes)
    return;
  lane.runs = 0;
  lane.graph = RunnableGraph(); // it holds the old shapes and addresses
  nvinfer1::IExecutionContext& context = *lane.context;
  const auto refused = [&](const std::string& what) {
    return Error(ErrorKind::session,
                 "TensorRT refused " + what + ": " + Logger::instance().taken() + "; build the engine again");
  };
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    nvinfer1::Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(shapes[i].size());
    std::copy(shapes[i].begin(), shapes[i].end(), dims.d);
    if (!context.setInputShape(inputs_[i].name.c_str(), dims))
      throw refused("the shape " + shape_text(shapes[i]) + " of input '" + inputs_[i].name + "'");
  }
  if (context.inferShapes(0, nullptr) != 0)
    throw refused("to tell the shapes of the outputs");
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    Buffer& buffer = lane.buffers[inputs_[i].name];
    buffer.ensure(bytes_of(shapes[i], native_dtype(inputs_[i])));
    if (!context.setTensorAddress(inputs_[i].name.c_str(), buffer.device.get()))
      throw refused("the address of input '" + inputs_[i].name + "'");
  }
  for (const TensorInfo& info : outputs_) {
    Buffer& buffer = lane.buffers[info.name];
    const std::vector<std::int64_t> shape = shape_of(context.getTensorShape(info.name.c_str()));
    lane.output_shapes[info.name] = shape;
    if (std::all_of(shape.begin(), shape.end(), [](std::int64_t length) { return length >= 0; })) {
      buffer.ensure(bytes_of(shape, native_dtype(info)));
      if (!context.setTensorAddress(info.name.c_str(), buffer.device.get()))
        throw refused("the address of output '" + info.name + "'");
      continue;
    }
    std::unique_ptr<GrowingOutput>& growing = lane.growing[info.name];
    if (!growing)
      growing = std::make_unique<GrowingOutput>(buffer);
    if (!context.setOutputAllocator(info.name.c_str(), growing.get()))
      throw refused("memory for output '" + info.name + "'");
  }
  lane.shapes = std::move(shapes);
}

void TrtSession::execute(Lane& lane) {
  // The first run with new shapes still sets the context up, which must not be recorded.
  if (use_graphs_ && lane.growing.empty() && lane.runs > 0 && !lane.graph)
    record(lane);
  if (lane.graph) {
    check(cudaGraphLaunch(lane.graph.get(), lane.stream.get()), "cudaGraphLaunch");
    return;
  }
  if (!lane.context->enqueueV3(lane.stream.get()))
    throw Error(ErrorKind::session, "'" + path_ + "' could not be run: " + Logger::instance().taken());
}

// An engine that cannot be recorded is an error where the caller asked for a graph, and runs without one otherwise.
void TrtSession::record(Lane& lane) {
  check(cudaStreamBeginCapture(lane.stream.get(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  const bool started = lane.context->enqueueV3(lane.stream.get());
  cudaGraph_t captured = nullptr;
  cudaError_t status = cudaStreamEndCapture(lane.stream.get(), &captured);
  const Graph graph(captured);
  cudaGraphExec_t runnable = nullptr;
  if (started && status == cudaSuccess) // of CUDA 11 too, where cudaGraphInstantiate has other arguments
    status = cudaGraphInstantiateWithFlags(&runnable, graph.get(), 0);
  if (started && status == cudaSuccess) {
    lane.graph = RunnableGraph(runnable);
    return;
  }
  (void)cudaGetLastError();
  const std::string reason = Logger::instance().taken(); // so that a later error has its own
  if (needs_graphs_)
    throw Error(ErrorKind::session, "'" + path_ + "' cannot be recorded as a CUDA graph (" +
                                        (started ? cudaGetErrorString(status) : reason) + "); run it without one");
  use_graphs_ = false;
}

Tensors TrtSession::download(Lane& lane) {
  if (!lane.growing.empty()) {
    check(cudaStreamSynchronize(lane.stream.get()), "the run");
    for (const auto& [name, growing] : lane.growing)
      lane.output_shapes[name] = growing->shape;
  }
  for (const TensorInfo& info : outputs_) {
    Buffer& buffer = lane.buffers.at(info.name);
    const std::size_t bytes = bytes_of(lane.output_shapes.at(info.name), native_dtype(info));
    if (bytes > buffer.bytes)
      throw Error(ErrorKind::session,
                  "output '" + info.name + "' of '" + path_ + "' is larger than its memory; build the engine again");
    if (bytes)
      check(cudaMemcpyAsync(buffer.host.get(), buffer.device.get(), bytes, cudaMemcpyDeviceToHost, lane.stream.get()),
            "the copy from the GPU");
  }
  check(cudaStreamSynchronize(lane.stream.get()), "the run");
  Tensors outputs;
  for (const TensorInfo& info : outputs_) {
    Tensor tensor(info.dtype, lane.output_shapes.at(info.name));
    const void* host = lane.buffers.at(info.name).host.get();
    if (narrow_.count(info.name))
      copy_values<std::int32_t, std::int64_t>(host, tensor.data(), tensor.bytes() / sizeof(std::int64_t));
    else if (tensor.bytes())
      std::memcpy(tensor.data(), host, tensor.bytes());
    outputs.emplace(info.name, std::move(tensor));
  }
  return outputs;
}

} // namespace detrt::tensorrt
