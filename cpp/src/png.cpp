// PNG through libpng: palettes and grey become RGB, 16 bits keep their upper 8, transparency is dropped.
#include <algorithm>
#include <cctype>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

#include <png.h>
#include <zlib.h>

#include "codecs.hpp"
#include "detrt/error.hpp"

namespace detrt {
namespace {

// libpng reports errors by a jump; nothing that has a destructor may live between the setjmp and the jump.
struct Jump {
  char text[200] = "";
  std::jmp_buf back;
};

[[noreturn]] void leave(png_structp png, png_const_charp message) {
  auto* jump = static_cast<Jump*>(png_get_error_ptr(png));
  std::snprintf(jump->text, sizeof jump->text, "%s", message);
  std::longjmp(jump->back, 1);
}
void no_message(png_structp, png_const_charp) {} // warnings are about metadata; the pixels are checked by errors

// A text of a PNG file, packed as it is stored.
struct PngText {
  bool packed = false;
  std::vector<std::uint8_t> data;

  // At most so many bytes, as in Pillow; none for damaged data.
  std::vector<std::uint8_t> unpacked() const {
    constexpr uLongf most = 1 << 20;
    if (!packed)
      return data;
    std::vector<std::uint8_t> made(most);
    uLongf size = most;
    if (uncompress(made.data(), &size, data.data(), data.size()) != Z_OK)
      return {};
    made.resize(size);
    return made;
  }
};

// What may say the orientation. Of several chunks the last one counts, so that one is unpacked, whatever their number.
struct PngMetadata {
  std::vector<std::uint8_t> exif;
  PngText profile; // EXIF in hexadecimal digits, as ImageMagick writes it
  PngText xmp;

  void add(std::string_view type, std::string_view data) {
    if (type == "eXIf") {
      exif.assign(data.begin(), data.end());
      return;
    }
    if (type.substr(1) != "TXt" && type != "tEXt")
      return;
    const std::string_view key = taken(data);
    PngText* const text = key == "Raw profile type exif" ? &profile : key == "XML:com.adobe.xmp" ? &xmp : nullptr;
    if (text == nullptr)
      return;
    bool packed = type == "zTXt";
    if (packed)
      data.remove_prefix(std::min<std::size_t>(data.size(), 1)); // the method, of which there is one
    if (type == "iTXt") {
      packed = data.size() > 1 && data[0] != 0;
      data.remove_prefix(std::min<std::size_t>(data.size(), 2));
      taken(data); // language
      taken(data); // translated key
    }
    *text = {packed, {data.begin(), data.end()}};
  }

  int orientation() const {
    std::vector<std::uint8_t> block = exif.empty() ? from_hexadecimal(profile.unpacked()) : exif;
    const std::string_view all(reinterpret_cast<const char*>(block.data()), block.size());
    constexpr std::string_view prefix("Exif\0\0", 6); // of JPEG segments
    const std::size_t skipped = all.substr(0, prefix.size()) == prefix ? prefix.size() : 0;
    if (const int found = exif_orientation({block.data() + skipped, block.size() - skipped}); found != 0)
      return found;
    const std::vector<std::uint8_t> text = xmp.unpacked();
    return xmp_orientation({text.data(), text.size()});
  }

private:
  // What stands before the next zero byte, which is left out of the rest.
  static std::string_view taken(std::string_view& data) {
    const std::string_view first = data.substr(0, data.find('\0'));
    data.remove_prefix(std::min(data.size(), first.size() + 1));
    return first;
  }

  // The bytes of a profile: a line break, its name and its length, and lines of digits.
  static std::vector<std::uint8_t> from_hexadecimal(const std::vector<std::uint8_t>& text) {
    std::vector<std::uint8_t> made;
    int lines = 0, high = -1;
    for (const std::uint8_t c : text) {
      lines += c == '\n';
      if (lines < 3 || std::isspace(c))
        continue;
      if (!std::isxdigit(c))
        return {};
      const int digit = c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
      if (high >= 0)
        made.push_back(static_cast<std::uint8_t>(high << 4 | digit));
      high = high >= 0 ? -1 : digit;
    }
    return made;
  }
};

struct PngReader {
  Jump jump;
  Bytes rest;
  png_structp png = nullptr;
  png_infop info = nullptr;
  PngMetadata metadata;

  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }

  static void read(png_structp png, png_bytep out, std::size_t size) {
    auto* self = static_cast<PngReader*>(png_get_io_ptr(png));
    if (size > self->rest.size)
      png_error(png, "the file ends too early");
    std::memcpy(out, self->rest.data, size);
    self->rest = {self->rest.data + size, self->rest.size - size};
  }

  static int keep(png_structp png, png_unknown_chunkp chunk) {
    try {
      auto* self = static_cast<PngReader*>(png_get_user_chunk_ptr(png));
      self->metadata.add({reinterpret_cast<const char*>(chunk->name), 4}, {reinterpret_cast<const char*>(chunk->data), chunk->size});
      return 1;
    } catch (const std::exception&) { // libpng is C
      return -1;
    }
  }

  bool header(Bytes file) {
    rest = file;
    png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &jump, leave, no_message);
    info = png == nullptr ? nullptr : png_create_info_struct(png);
    if (info == nullptr || setjmp(jump.back))
      return false;
    png_set_read_fn(png, this, read);
    png_set_user_limits(png, 0x7fffffff, 0x7fffffff); // pixels are counted by the caller
    png_set_crc_action(png, PNG_CRC_ERROR_QUIT, PNG_CRC_ERROR_QUIT); // also of what is not needed, as in Pillow
    // libpng would unpack texts to 8 MB each, a thousand times.
    constexpr png_byte unread[] = {'s', 'P', 'L', 'T', 0};
    constexpr png_byte kept[] = {'t', 'E', 'X', 't', 0, 'z', 'T', 'X', 't', 0, 'i', 'T', 'X', 't', 0, 'e', 'X', 'I', 'f', 0};
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, unread, 1);
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_ALWAYS, kept, 4);
    png_set_read_user_chunk_fn(png, this, keep);
    png_read_info(png, info);
    return true;
  }

  bool pixels(png_bytepp rows, std::size_t stride) {
    if (setjmp(jump.back))
      return false;
    png_set_expand(png);
    png_set_strip_16(png);
    png_set_strip_alpha(png);
    png_set_gray_to_rgb(png);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    if (png_get_rowbytes(png, info) != stride)
      png_error(png, "rows of an unexpected length");
    png_read_image(png, rows);
    return true;
  }

  // Metadata after the pixels; damage there says nothing about them.
  void tail() {
    if (setjmp(jump.back))
      return;
    png_read_end(png, info);
  }
};

} // namespace

bool is_png(Bytes file) noexcept {
  return file.size > 8 && png_sig_cmp(file.data, 0, 8) == 0;
}

Decoded read_png(Bytes file, const std::string& name, std::int64_t most) {
  const auto reader = std::make_unique<PngReader>();
  const auto damaged = [&] {
    return Error(ErrorKind::image, name + " is damaged or truncated: " + reader->jump.text + "; copy it again");
  };
  if (!reader->header(file))
    throw damaged();
  const std::int64_t width = png_get_image_width(reader->png, reader->info),
                     height = png_get_image_height(reader->png, reader->info);
  check_pixels(width, height, name, most);
  Decoded decoded;
  decoded.image = Image(static_cast<int>(height), static_cast<int>(width));
  const std::size_t stride = static_cast<std::size_t>(width) * 3;
  std::vector<png_bytep> rows(static_cast<std::size_t>(height));
  for (std::size_t y = 0; y < rows.size(); ++y)
    rows[y] = decoded.image.rgb.data() + y * stride;
  if (!reader->pixels(rows.data(), stride))
    throw damaged();
  reader->tail();
  decoded.orientation = reader->metadata.orientation();
  return decoded;
}

std::string write_png(const Image& image, const std::filesystem::path& path) {
  png_image head;
  std::memset(&head, 0, sizeof head);
  head.version = PNG_IMAGE_VERSION;
  head.width = static_cast<png_uint_32>(image.width);
  head.height = static_cast<png_uint_32>(image.height);
  head.format = PNG_FORMAT_RGB;
  head.flags = PNG_IMAGE_FLAG_FAST;
  return png_image_write_to_file(&head, path.c_str(), 0, image.rgb.data(), 0, nullptr) == 0 ? head.message : "";
}

} // namespace detrt
