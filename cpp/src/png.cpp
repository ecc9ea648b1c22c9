// PNG through libpng: palettes and grey become RGB, 16 bits keep their upper 8, transparency is dropped.
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <memory>

#include <png.h>

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

constexpr png_uint_32 most_texts = 8; // of iTXt

struct PngReader {
  Jump jump;
  Bytes rest;
  png_structp png = nullptr;
  png_infop info = nullptr;

  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }

  static void read(png_structp png, png_bytep out, std::size_t size) {
    auto* self = static_cast<PngReader*>(png_get_io_ptr(png));
    if (size > self->rest.size)
      png_error(png, "the file ends too early");
    std::memcpy(out, self->rest.data, size);
    self->rest = {self->rest.data + size, self->rest.size - size};
  }

  bool header(Bytes file) {
    rest = file;
    png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &jump, leave, no_message);
    info = png == nullptr ? nullptr : png_create_info_struct(png);
    if (info == nullptr || setjmp(jump.back))
      return false;
    png_set_read_fn(png, this, read);
    png_set_user_limits(png, 0x7fffffff, 0x7fffffff); // pixels are counted by the caller
    // Texts may unpack to 8 MB each, a thousand times; those that can hold XMP are bounded as in Pillow.
    constexpr png_byte unread[] = {'t', 'E', 'X', 't', 0, 'z', 'T', 'X', 't', 0, 's', 'P', 'L', 'T', 0};
    png_set_keep_unknown_chunks(png, PNG_HANDLE_CHUNK_NEVER, unread, 3);
    png_set_chunk_cache_max(png, 1 + most_texts);
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

  int orientation() {
    png_bytep data = nullptr;
    png_uint_32 size = 0;
    int found = 0;
    if (png_get_eXIf_1(png, info, &size, &data) != 0 && data != nullptr)
      found = exif_orientation({data, size});
    png_textp text = nullptr;
    int count = 0;
    png_get_text(png, info, &text, &count);
    for (int i = 0; i < count && found == 0; ++i)
      if (std::strcmp(text[i].key, "XML:com.adobe.xmp") == 0 && text[i].text != nullptr)
        found = xmp_orientation({reinterpret_cast<const std::uint8_t*>(text[i].text), std::strlen(text[i].text)});
    return found;
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
  decoded.orientation = reader->orientation();
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
