// Orientation from EXIF and XMP, and the PNM format.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "codecs.hpp"
#include "detrt/error.hpp"

namespace detrt {
namespace {

constexpr std::uint32_t orientation_tag = 0x0112;

std::uint32_t number(Bytes from, std::size_t at, std::size_t bytes, bool little) noexcept {
  std::uint32_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i)
    value = value << 8 | from.data[at + (little ? bytes - 1 - i : i)];
  return value;
}

bool is_space(std::uint8_t c) noexcept {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

} // namespace

int exif_orientation(Bytes tiff) noexcept {
  if (tiff.size < 8)
    return 0;
  const bool little = tiff.data[0] == 'I' && tiff.data[1] == 'I';
  if (!little && !(tiff.data[0] == 'M' && tiff.data[1] == 'M'))
    return 0;
  const std::size_t start = number(tiff, 4, 4, little);
  if (number(tiff, 2, 2, little) != 42 || start > tiff.size - 2)
    return 0;
  const std::size_t entries = number(tiff, start, 2, little);
  for (std::size_t i = 0; i < entries; ++i) {
    const std::size_t at = start + 2 + i * 12;
    if (at + 12 > tiff.size)
      return 0;
    if (number(tiff, at, 2, little) != orientation_tag)
      continue;
    const std::uint32_t type = number(tiff, at + 2, 2, little);
    const std::size_t bytes = type == 3 || type == 8 ? 2 : type == 4 || type == 9 ? 4 : 0; // short and long, unsigned or signed
    const std::size_t count = number(tiff, at + 4, 4, little);
    if (bytes == 0 || count == 0)
      return 1;
    // The first of several values counts; more than four bytes of them lie elsewhere.
    const std::size_t first = bytes * count > 4 ? number(tiff, at + 8, 4, little) : at + 8;
    if (bytes * count > tiff.size || first > tiff.size - bytes * count)
      return 0;
    const std::uint32_t value = number(tiff, first, bytes, little);
    return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 0;
}

int xmp_orientation(Bytes text) noexcept {
  const std::string_view all(reinterpret_cast<const char*>(text.data), text.size);
  constexpr std::string_view key = "tiff:Orientation";
  for (std::size_t at = all.find(key); at != std::string_view::npos; at = all.find(key, at + 1)) {
    std::string_view rest = all.substr(at + key.size());
    for (const std::string_view opening : {std::string_view("=\""), std::string_view(">")})
      if (rest.substr(0, opening.size()) == opening && rest.size() > opening.size()) {
        const char digit = rest[opening.size()];
        if (digit >= '0' && digit <= '9')
          return digit - '0';
      }
  }
  return 0;
}

bool is_pnm(Bytes file) noexcept {
  return file.size > 2 && file.data[0] == 'P' && (file.data[1] == '5' || file.data[1] == '6') &&
         is_space(file.data[2]);
}

Decoded read_pnm(Bytes file, const std::string& name, std::int64_t most) {
  const auto damaged = [&] { return Error(ErrorKind::image, name + " is damaged or truncated; copy it again"); };
  std::size_t at = 2;
  std::int64_t numbers[3];
  for (std::int64_t& value : numbers) {
    value = 0;
    int digits = 0; // one white space ends a number; a comment ends none, and none of its line is read
    for (; at < file.size && !(digits > 0 && is_space(file.data[at])); ++at) {
      const std::uint8_t c = file.data[at];
      if (c == '#') {
        while (at < file.size && file.data[at] != '\n' && file.data[at] != '\r')
          ++at;
      } else if (!is_space(c)) {
        if (c < '0' || c > '9' || ++digits > 10)
          throw damaged();
        value = value * 10 + (c - '0');
      }
    }
    if (at >= file.size)
      throw damaged();
    ++at;
  }
  check_pixels(numbers[0], numbers[1], name, most);
  if (numbers[2] != 255)
    throw Error(ErrorKind::image,
                name + " has values up to " + std::to_string(numbers[2]) + "; of PNM only 255 is read: convert it");
  const std::size_t channels = file.data[1] == '6' ? 3 : 1;
  Decoded decoded;
  decoded.image = Image(static_cast<int>(numbers[1]), static_cast<int>(numbers[0]));
  auto& rgb = decoded.image.rgb;
  if (file.size - at < rgb.size() / 3 * channels)
    throw damaged();
  if (channels == 3)
    std::copy_n(file.data + at, rgb.size(), rgb.begin());
  else
    for (std::size_t i = 0; i < rgb.size(); ++i)
      rgb[i] = file.data[at + i / 3];
  return decoded;
}

} // namespace detrt
