#include "detrt/image.hpp"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <set>

#include "codecs.hpp"
#include "detrt/error.hpp"
#include "unfinished.hpp"

namespace detrt {
namespace fs = std::filesystem;
namespace {

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::image, message);
}

// Where pixel (y, x) of the upright image is stored, for the EXIF orientations 2..8.
Image upright(Image image, int orientation) {
  if (orientation < 2 || orientation > 8)
    return image;
  const int h = image.height, w = image.width;
  const bool swapped = orientation >= 5;
  Image made(swapped ? w : h, swapped ? h : w);
  std::uint8_t* out = made.rgb.data();
  for (int y = 0; y < made.height; ++y)
    for (int x = 0; x < made.width; ++x) {
      const int a = swapped ? x : y, b = swapped ? y : x; // row and column before flipping
      const bool flip_rows = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 6;
      const bool flip_columns = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
      const auto row = static_cast<std::size_t>(flip_rows ? h - 1 - a : a);
      const auto column = static_cast<std::size_t>(flip_columns ? w - 1 - b : b);
      out = std::copy_n(image.rgb.data() + (row * static_cast<std::size_t>(w) + column) * 3, 3, out);
    }
  return made;
}

std::string suffix_of(const fs::path& path) {
  std::string suffix = path.extension().string();
  std::transform(suffix.begin(), suffix.end(), suffix.begin(), [](unsigned char c) { return std::tolower(c); });
  return suffix;
}

// Natural order: img2 before img10. The path breaks ties.
bool natural_less(const std::string& a, const std::string& b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (digit(a[i]) && digit(b[j])) {
      std::size_t m = i, n = j;
      while (m < a.size() && digit(a[m]))
        ++m;
      while (n < b.size() && digit(b[n]))
        ++n;
      while (i + 1 < m && a[i] == '0')
        ++i;
      while (j + 1 < n && b[j] == '0')
        ++j;
      if (m - i != n - j)
        return m - i < n - j;
      const int order = a.compare(i, m - i, b, j, n - j);
      if (order != 0)
        return order < 0;
      i = m;
      j = n;
      continue;
    }
    const auto x = std::tolower(static_cast<unsigned char>(a[i])), y = std::tolower(static_cast<unsigned char>(b[j]));
    if (x != y)
      return x < y;
    ++i;
    ++j;
  }
  return a.size() - i != b.size() - j ? a.size() - i < b.size() - j : a < b;
}

const std::set<std::string>& image_suffixes() {
  static const std::set<std::string> suffixes{".jfif", ".jpe", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm"};
  return suffixes;
}

// Of the images and videos that Python reads besides; see detrt.data.images.
const std::set<std::string>& other_suffixes() {
  static const std::set<std::string> suffixes{
      ".avif", ".bmp", ".dib", ".gif", ".heic", ".heif", ".hif", ".j2k", ".jp2", ".jpx", ".pbm", ".qoi", ".tga", ".tif", ".tiff", ".webp",
      ".3gp",  ".avi", ".flv", ".m2ts", ".m4v", ".mkv",  ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts",  ".webm", ".wmv",  ".y4m"};
  return suffixes;
}

std::vector<std::string> images_below(const fs::path& folder, std::map<std::string, std::size_t>* left_out) {
  std::vector<std::string> found;
  std::error_code error;
  fs::recursive_directory_iterator step(folder, fs::directory_options::skip_permission_denied, error), end;
  while (!error && step != end) {
    const bool hidden = step->path().filename().string().rfind('.', 0) == 0;
    if (step->is_directory(error) && hidden)
      step.disable_recursion_pending();
    else if (!hidden && (step->is_regular_file(error) || !step->exists(error))) { // a link to nothing is named when it is opened
      const std::string suffix = suffix_of(step->path());
      if (image_suffixes().count(suffix))
        found.push_back(step->path().string());
      else if (left_out != nullptr && other_suffixes().count(suffix))
        ++(*left_out)[suffix];
    }
    step.increment(error);
  }
  std::sort(found.begin(), found.end(), natural_less);
  return found;
}

} // namespace

void check_pixels(std::int64_t width, std::int64_t height, const std::string& name, std::int64_t most) {
  const std::string size = std::to_string(width) + "x" + std::to_string(height);
  if (width < 1 || height < 1)
    fail(name + " has no pixels: " + size);
  if (width > most / height)
    fail(name + " is too large: " + size + "; allowed are " + std::to_string(most) + " pixels. Make it smaller");
}

Image decode_image(const std::uint8_t* data, std::size_t size, const std::string& name, std::int64_t most) {
  const Bytes file{data, size};
  if (size == 0)
    fail(name + " is empty (0 bytes); copy or download it again");
  const auto read = is_jpeg(file) ? read_jpeg : is_png(file) ? read_png : is_pnm(file) ? read_pnm : nullptr;
  if (read == nullptr)
    fail(name + " is not a JPEG, PNG or binary PNM image (P5, P6), or it is damaged; the C++ runtime reads these: convert it");
  Decoded decoded = read(file, name, most);
  return upright(std::move(decoded.image), decoded.orientation);
}

namespace {

constexpr std::streamoff longest_file = std::streamoff{2} << 30; // bytes; the largest allowed image has 1.5 GB, not compressed

JpegFile read_file(const fs::path& path) {
  const std::string name = "'" + path.string() + "'";
  std::error_code error;
  if (path.empty())
    fail("the image path is '' (empty); give the path of an image file");
  if (fs::is_directory(path, error))
    fail(name + " is a folder, not an image");
  if (!fs::exists(path, error))
    fail("there is no file " + name + "; check the path");
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto end = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (end < 0)
    fail(name + " cannot be read; check its permissions");
  if (end > longest_file)
    fail(name + " has " + std::to_string(end) + " bytes; at most " + std::to_string(longest_file) + " are read: give an image");
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(end));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), end);
  if (file.gcount() != end)
    fail(name + " cannot be read to its end; copy it again");
  return {std::move(bytes), name};
}

} // namespace

Image load_image(const fs::path& path) {
  const JpegFile file = read_file(path);
  return decode_image(file.data.data(), file.data.size(), file.name);
}

Image load_encoded(const fs::path& path) {
  auto file = std::make_shared<const JpegFile>(read_file(path));
  const std::optional<Size> size = common_jpeg({file->data.data(), file->data.size()});
  if (!size)
    return decode_image(file->data.data(), file->data.size(), file->name);
  Image image;
  image.height = size->height;
  image.width = size->width;
  image.jpeg = std::move(file);
  return image;
}

Image decoded(const Image& image) {
  return image.jpeg ? decode_image(image.jpeg->data.data(), image.jpeg->data.size(), image.jpeg->name) : image;
}

void save_image(const Image& image, const fs::path& path) {
  const std::string suffix = suffix_of(path);
  const bool jpeg = suffix == ".jpg" || suffix == ".jpeg";
  if (!jpeg && suffix != ".png")
    throw Error(ErrorKind::output, "'" + path.string() + "' must end with .jpg, .jpeg or .png");
  std::error_code error;
  if (!path.parent_path().empty())
    fs::create_directories(path.parent_path(), error);
  std::string why;
  try {
    Unfinished file(path);
    why = jpeg ? write_jpeg(image, file.path(), 92) : write_png(image, file.path());
    if (why.empty())
      file.finish();
  } catch (const fs::filesystem_error& failed) {
    why = failed.code().message();
  }
  if (!why.empty())
    throw Error(ErrorKind::output, "cannot write '" + path.string() + "': " + why +
                                       "; check the folder, its permissions and the space on the disk");
}

std::vector<fs::path> expand_inputs(const std::vector<std::string>& names, std::map<std::string, std::size_t>* left_out) {
  if (names.empty())
    fail("no inputs: give image files or folders");
  std::vector<fs::path> found;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    std::error_code error;
    if (name.empty())
      fail("an input name is '' (empty); give a file or a folder");
    if (!fs::exists(name, error))
      fail("there is no file '" + name + "'; check the path");
    std::vector<std::string> files{name};
    if (fs::is_directory(name, error)) {
      files = images_below(name, left_out);
      if (files.empty()) {
        std::string known;
        for (const std::string& suffix : image_suffixes())
          known += " " + suffix;
        fail("the folder '" + name + "' has no images; known suffixes:" + known);
      }
    }
    for (const std::string& file : files)
      if (seen.insert(file).second)
        found.emplace_back(file);
  }
  return found;
}

} // namespace detrt
