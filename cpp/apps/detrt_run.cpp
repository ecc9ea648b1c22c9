// detrt-run: images through a bundle, without Python.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <new>
#include <set>

#include <sys/stat.h>

#include "detrt/detrt.h"
#include "detrt/draw.hpp"
#include "detrt/error.hpp"
#include "options.hpp"
#include "outputs.hpp"

namespace fs = std::filesystem;
using detrt::Error;
using detrt::ErrorKind;

namespace {

using Time = std::chrono::steady_clock::time_point;
double ms_since(Time start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

struct Loaded {
  fs::path path;
  detrt::Image image;
  std::string error; // empty: the image is there
};

detrt::Image read_image(const fs::path& path, const Options& options) {
  return options.decode_on_gpu ? detrt::load_encoded(path) : detrt::load_image(path);
}

std::vector<Loaded> load(const std::vector<fs::path>& paths, const Options& options, std::size_t start, std::size_t count) {
  std::vector<Loaded> loaded;
  for (std::size_t i = start; i < std::min(start + count, paths.size()); ++i) {
    loaded.push_back({paths[i], {}, ""});
    try {
      loaded.back().image = read_image(paths[i], options);
    } catch (const Error& error) {
      loaded.back().error = error.what();
    } catch (const std::bad_alloc&) { // of one image: the others may fit
      loaded.back().error = "'" + paths[i].string() + "' needs more memory than there is; make it smaller";
    }
  }
  return loaded;
}

// Where annotated copies go: the folder with the part of each path that the inputs do not share. No two of them have one name, and
// of a file that is given by two names there is one copy.
class Copies {
public:
  Copies(const fs::path& folder, const std::vector<fs::path>& inputs) : folder_(folder) {
    using Place = std::pair<dev_t, ino_t>;
    std::map<Place, fs::path> read; // by the file itself: a link is another name of it
    struct stat facts {};
    for (const fs::path& input : inputs) {
      const fs::path parent = fs::absolute(input).lexically_normal().parent_path();
      if (::stat(input.c_str(), &facts) == 0)
        read.emplace(Place{facts.st_dev, facts.st_ino}, input);
      if (&input == &inputs.front())
        root_ = parent;
      while (!root_.empty() && parent.lexically_relative(root_).string().rfind("..", 0) == 0)
        root_ = root_.parent_path();
    }
    std::set<std::string> taken;
    for (const fs::path& input : inputs)
      taken.insert(name_of(input).string());
    for (const fs::path& input : inputs) {
      fs::path name = name_of(input);
      const auto [known, added] = targets_.emplace(name.string(), fs::path());
      if (!added)
        continue;
      if (!is_written(name.extension().string())) {
        do
          name += ".png";
        while (!taken.insert(name.string()).second); // of an input that has it, or of its copy
      }
      known->second = folder_ / name;
      if (::stat(known->second.c_str(), &facts) != 0)
        continue;
      const auto replaced = read.find(Place{facts.st_dev, facts.st_ino});
      if (replaced != read.end())
        throw Error(ErrorKind::output, "the annotated copy of '" + input.string() + "' would replace the input '" +
                                           replaced->second.string() + "'; give another --save");
    }
  }
  void save(const Loaded& loaded, const detrt::Detections& found) const {
    detrt::save_image(detrt::draw_detections(detrt::decoded(loaded.image), found), targets_.at(name_of(loaded.path).string()));
  }

private:
  fs::path name_of(const fs::path& input) const { return fs::absolute(input).lexically_normal().lexically_relative(root_); }
  static bool is_written(const std::string& suffix) {
    const auto kept = {".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG"};
    return std::find(kept.begin(), kept.end(), suffix) != kept.end();
  }
  fs::path folder_, root_;
  std::map<std::string, fs::path> targets_; // by `name_of` an input
};

// "street.jpg: 2 person, 1 dog", most frequent first.
std::string summary(const std::string& image, const detrt::Detections& found) {
  std::vector<std::pair<std::string, int>> counts;
  for (const detrt::Detection& d : found.found) {
    const auto same = std::find_if(counts.begin(), counts.end(), [&](const auto& row) { return row.first == d.label; });
    if (same == counts.end())
      counts.emplace_back(d.label, 1);
    else
      ++same->second;
  }
  std::stable_sort(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  std::string text;
  for (const auto& [label, count] : counts)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + printable(label);
  return printable(image) + ": " + (counts.empty() ? "nothing" : text);
}

// The detections of the images that were read, in order. An image that the model fails on gets an error; a model that fails on an
// image of its own size as well is at fault itself, which is thrown.
std::vector<detrt::Detections> detections_of(const detrt::Detector& detector, std::vector<Loaded>& loaded) {
  std::vector<Loaded*> read;
  std::vector<const detrt::Image*> images;
  for (Loaded& one : loaded)
    if (one.error.empty()) {
      read.push_back(&one);
      images.push_back(&one.image);
    }
  try {
    return detector(images);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::session)
      throw;
    std::vector<detrt::Detections> found;
    for (Loaded* one : read)
      try {
        found.push_back(std::move(detector(std::vector<const detrt::Image*>{&one->image}).front()));
      } catch (const Error& own) {
        const detrt::Size size = one->image.size();
        one->error = "'" + one->path.string() + "', of " + std::to_string(size.height) + "x" + std::to_string(size.width) +
                     " pixels, fails in the model: " + own.what();
      }
    if (found.empty()) {
      const detrt::Size own = detector.spec().input.size;
      detector(std::vector<detrt::Image>{detrt::Image(own.height, own.width)});
    }
    return found;
  }
}

int detect(const Options& options, const detrt::Detector& detector, const std::vector<fs::path>& paths) {
  std::unique_ptr<JsonLines> json;
  std::unique_ptr<Copies> copies;
  if (!options.json.empty())
    json = std::make_unique<JsonLines>(options.json);
  if (!options.save.empty())
    copies = std::make_unique<Copies>(options.save, paths);
  const auto step = static_cast<std::size_t>(detector.batch());
  std::vector<std::string> bad;
  auto next = std::async(std::launch::async, load, std::cref(paths), std::cref(options), 0, step);
  for (std::size_t start = 0; start < paths.size(); start += step) {
    std::vector<Loaded> loaded = next.get();
    if (start + step < paths.size()) // decode a batch ahead while the model runs
      next = std::async(std::launch::async, load, std::cref(paths), std::cref(options), start + step, step);
    const std::vector<detrt::Detections> found = detections_of(detector, loaded);
    auto result = found.begin();
    for (const Loaded& one : loaded) {
      const std::string name = one.path.string();
      if (!one.error.empty()) {
        if (options.strict)
          throw Error(ErrorKind::image, one.error);
        std::fprintf(stderr, "skipped: %s\n", printable(one.error).c_str());
        bad.push_back(name);
        continue;
      }
      if (json)
        json->write(detrt::to_json(*result, name));
      else if (!copies && !options.quiet)
        write_line(summary(name, *result));
      if (copies)
        copies->save(one, *result);
      ++result;
    }
  }
  if (json)
    json->finish();
  if (bad.empty())
    return 0;
  std::string names;
  for (std::size_t i = 0; i < std::min<std::size_t>(3, bad.size()); ++i)
    names += (i ? ", " : "") + bad[i];
  throw Error(ErrorKind::image, std::to_string(bad.size()) + " of " + std::to_string(paths.size()) +
                                    " inputs could not be read: " + names + (bad.size() > 3 ? " ..." : "") +
                                    "; all others were done");
}

void row(const char* name, std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double fraction) {
    return samples[static_cast<std::size_t>(fraction * static_cast<double>(samples.size() - 1) + 0.5)];
  };
  std::printf("%-14s p50 %8.3f  p90 %8.3f  min %8.3f ms\n", name, at(0.5), at(0.9), samples.front());
}

// Times one batch of the inputs from files to detections, part by part.
int benchmark(const Options& options, const detrt::Detector& detector, const std::vector<fs::path>& paths,
              double startup_ms) {
  const auto count = static_cast<std::size_t>(detector.batch());
  std::vector<fs::path> batch;
  for (std::size_t i = 0; i < count; ++i)
    batch.push_back(paths[i % paths.size()]);
  std::vector<double> read, preprocess, model, forward, decode, boxes, whole;
  constexpr int warmup = 5;
  for (int i = 0; i < warmup + options.benchmark; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<detrt::Image> images;
    for (const fs::path& path : batch)
      images.push_back(read_image(path, options));
    const double read_ms = ms_since(start);
    detrt::Timing timing;
    const auto found = detector(images, &timing);
    if (i < warmup)
      continue;
    whole.push_back(ms_since(start));
    read.push_back(read_ms);
    preprocess.push_back(timing.preprocess_ms);
    model.push_back(timing.model_ms);
    forward.push_back(timing.forward_ms);
    decode.push_back(timing.decode_ms);
    boxes.push_back(timing.preprocess_ms + timing.model_ms + timing.decode_ms);
  }
  std::printf("%s, batch %zu, %d runs after %d; start-up %.0f ms\n", detector.session().backend().c_str(), count,
              options.benchmark, warmup, startup_ms);
  row("read", read);
  row("preprocess", preprocess);
  row("model", model);
  if (forward.front() > 0)
    row("  forward", forward);
  row("decode", decode);
  row("image to boxes", boxes);
  row("end to end", whole);
  return 0;
}

int run(int count, char** arguments) {
  const auto start = std::chrono::steady_clock::now();
  const std::optional<Options> given = parse_options(count, arguments);
  if (!given) { // --help and --version have printed
    check_stdout();
    return 0;
  }
  const Options& options = *given;
  std::map<std::string, std::size_t> left_out;
  const std::vector<fs::path> paths = detrt::expand_inputs(options.inputs, &left_out);
  refuse_replacing(options, paths);
  const detrt::Detector detector = detrt::Detector::open(options.bundle, options.detector);
  if (options.decode_on_gpu && !detector.session().decodes_jpegs())
    throw Error(ErrorKind::usage, "--image-decoder gpu is for TensorRT, without --resize-on-cpu, where libdetrt was built "
                                  "with nvJPEG; this is " +
                                      detector.session().backend() + ": leave it out");
  if (!left_out.empty() && !options.quiet) {
    std::string list;
    for (const auto& [suffix, times] : left_out)
      list += (list.empty() ? "" : ", ") + std::to_string(times) + " " + suffix;
    std::fprintf(stderr, "note: left out of the folders: %s; detrt detect reads them\n", list.c_str());
  }
  const double startup_ms = ms_since(start);
  const int code = options.benchmark > 0 ? benchmark(options, detector, paths, startup_ms) : detect(options, detector, paths);
  check_stdout();
  return code;
}

} // namespace

int main(int count, char** arguments) {
  try {
    open_streams();
    return run(count, arguments);
  } catch (const Error& error) {
    std::fprintf(stderr, "detrt-run: %s\n", printable(error.what(), "\n").c_str());
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "detrt-run: not enough memory; use a smaller size or batch, or a machine with more\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "detrt-run: a bug: %s\n", error.what());
    return 1;
  }
}
