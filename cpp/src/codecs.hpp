// One function for each file format. Each throws Error (image) with the name in front of the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "detrt/image.hpp"

namespace detrt {

struct Bytes {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

struct Decoded {
  Image image;
  int orientation = 1; // EXIF, 1..8
};

bool is_jpeg(Bytes file) noexcept;
bool is_png(Bytes file) noexcept;
bool is_pnm(Bytes file) noexcept;
Decoded read_jpeg(Bytes file, const std::string& name, std::int64_t most);
// Height and width of a complete JPEG file in 8-bit grey or YCbCr, stored upright, whose pixels do not depend on the decoder; as
// common_jpeg of src/detrt/data/images.py.
std::optional<Size> common_jpeg(Bytes file);
Decoded read_png(Bytes file, const std::string& name, std::int64_t most);
Decoded read_pnm(Bytes file, const std::string& name, std::int64_t most);
// Both return why the file could not be written; nothing: it was.
std::string write_jpeg(const Image& image, const std::filesystem::path& path, int quality);
std::string write_png(const Image& image, const std::filesystem::path& path);

// Throws for a header with no pixels or too many, before any allocation.
void check_pixels(std::int64_t width, std::int64_t height, const std::string& name, std::int64_t most);

// Orientation in an EXIF block (from its TIFF header): 0 if it has none, 1 if it has another value than 1 to 8.
int exif_orientation(Bytes tiff) noexcept;
// Orientation in XMP text, 0 if it has none. Pillow reads EXIF first.
int xmp_orientation(Bytes text) noexcept;

} // namespace detrt
