// Images: JPEG, PNG and PNM files to RGB bytes, the resize of Pillow, and writing JPEG and PNG.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "detrt/spec.hpp"

namespace detrt {

// RGB, 8 bits per channel, rows from the top, no gaps.
struct Image {
  int height = 0;
  int width = 0;
  std::vector<std::uint8_t> rgb;

  Image() = default;
  Image(int h, int w) : height(h), width(w), rgb(static_cast<std::size_t>(h) * static_cast<std::size_t>(w) * 3) {}
  Size size() const noexcept { return {height, width}; }
};

constexpr std::int64_t max_pixels = 178'956'970; // as in Python: 0.5 GB of RGB pixels

// A file as the Python side reads it: EXIF orientation applied, transparency dropped, 16 bits cut to their upper 8.
// Throws Error (image): missing, empty, damaged, cut off or too large file, or another format.
Image load_image(const std::filesystem::path& path);
// The same from the content of a file. name: for messages. most: pixels above which a header is refused.
Image decode_image(const std::uint8_t* data, std::size_t size, const std::string& name = "the image",
                   std::int64_t most = max_pixels);

// The resize of Pillow for 8-bit pixels, number for number: two passes with 22-bit fixed-point weights.
Image resize_image(const Image& image, Size size, Resample resample);

// By suffix .jpg, .jpeg (quality 92) or .png; under a temporary name that is renamed. Throws Error (output).
void save_image(const Image& image, const std::filesystem::path& path);

// Images to detect in: a file as it is, a folder with all images below it in natural order (img2 before img10).
// Throws Error (image): nothing given, a path that does not exist, a folder without images.
std::vector<std::filesystem::path> expand_inputs(const std::vector<std::string>& names);

} // namespace detrt
