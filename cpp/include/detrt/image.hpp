// Images: JPEG, PNG and PNM files to RGB bytes, Pillow's resize, and writing of JPEG and PNG.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "detrt/spec.hpp"

namespace detrt {

// The content of a JPEG file, and its name for messages.
struct JpegFile {
  std::vector<std::uint8_t> data;
  std::string name;
};

// RGB, 8 bits per channel, rows from the top, no gaps.
struct Image {
  int height = 0;
  int width = 0;
  std::vector<std::uint8_t> rgb;
  std::shared_ptr<const JpegFile> jpeg{}; // of load_encoded(): what is decoded later; rgb is empty then

  Image() = default;
  Image(int h, int w) : height(h), width(w), rgb(static_cast<std::size_t>(h) * static_cast<std::size_t>(w) * 3) {}
  Size size() const noexcept { return {height, width}; }
};

constexpr std::int64_t max_pixels = 178'956'970; // as in Python: 0.5 GB of RGB pixels

// Reads a file as in Python: applies the EXIF orientation, drops transparency, keeps the upper 8 of 16 bits.
// Throws Error (image): missing, empty, damaged, truncated or too large file, or another format.
Image load_image(const std::filesystem::path& path);
// The same for a session that decodes JPEG files on its GPU (`Session::decodes_jpegs`): a file in 8-bit grey or YCbCr that is stored
// upright stays encoded. Its pixels are then the GPU's, which differ from libjpeg's by some levels.
Image load_encoded(const std::filesystem::path& path);
// An image with its pixels: decodes on the CPU what load_encoded() left. Throws Error (image).
Image decoded(const Image& image);
// As load_image(), from the content of a file. name: for messages. most: largest number of pixels that a header may have.
Image decode_image(const std::uint8_t* data, std::size_t size, const std::string& name = "the image",
                   std::int64_t most = max_pixels);

// Pillow's resize of 8-bit pixels, bit for bit: two passes with 22-bit fixed-point weights.
Image resize_image(const Image& image, Size size, Resample resample);

// By suffix .jpg, .jpeg (quality 92) or .png; atomically. Throws Error (output).
void save_image(const Image& image, const std::filesystem::path& path);

// Expands inputs: a file as it is, a folder to all images below it in natural order (img2 before img10).
// left_out: how many images and videos of other types the folders have, by suffix, which `detrt detect` reads.
// Throws Error (image): no inputs, a path that does not exist, a folder without images.
std::vector<std::filesystem::path> expand_inputs(const std::vector<std::string>& names,
                                                 std::map<std::string, std::size_t>* left_out = nullptr);

} // namespace detrt
