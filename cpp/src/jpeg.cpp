// JPEG through libjpeg-turbo, with Pillow's settings: exact DCT, smooth upsampling, CMYK as in Adobe files.
#include <algorithm>
#include <cerrno>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>

#include <jerror.h>
#include <jpeglib.h>

#include "codecs.hpp"
#include "detrt/error.hpp"

namespace detrt {
namespace {

// libjpeg reports errors by a jump; nothing that has a destructor may live between the setjmp and the jump.
struct Errors {
  jpeg_error_mgr manager;
  std::jmp_buf back;
  char text[JMSG_LENGTH_MAX];
};

[[noreturn]] void leave(j_common_ptr info) {
  auto* errors = reinterpret_cast<Errors*>(info->err);
  (*info->err->format_message)(info, errors->text);
  std::longjmp(errors->back, 1);
}
void no_message(j_common_ptr) {} // warnings are ignored, as in Pillow

boolean cut_off(j_decompress_ptr info) {
  ERREXIT(info, JERR_INPUT_EOF);
  return FALSE;
}

jpeg_error_mgr* install(Errors& errors) {
  jpeg_error_mgr* manager = jpeg_std_error(&errors.manager);
  manager->error_exit = leave;
  manager->output_message = no_message;
  return manager;
}

// As in src/detrt/data/images.py: each scan, of some ten bytes, goes through all pixels.
constexpr std::size_t most_scans = 100;
bool has_too_many_scans(Bytes file) {
  const std::string_view bytes(reinterpret_cast<const char*>(file.data), file.size);
  constexpr std::string_view header{"\xff\xda\0", 3}; // coded pixels have no such bytes
  std::size_t scans = 0;
  for (std::size_t at = bytes.find(header); at != bytes.npos && scans <= most_scans; at = bytes.find(header, at + 1))
    ++scans;
  return scans > most_scans;
}

struct JpegReader {
  jpeg_decompress_struct info{};
  Errors errors{};
  bool made = false;

  ~JpegReader() {
    if (made)
      jpeg_destroy_decompress(&info);
  }

  // Size, components and metadata; false with errors.text set.
  bool header(Bytes file) {
    info.err = install(errors);
    if (setjmp(errors.back))
      return false;
    jpeg_create_decompress(&info);
    made = true;
    jpeg_mem_src(&info, file.data, static_cast<unsigned long>(file.size));
    info.src->fill_input_buffer = cut_off;
    jpeg_save_markers(&info, JPEG_APP0 + 1, 0xFFFF);
    jpeg_read_header(&info, TRUE);
    return true;
  }

  bool pixels(std::uint8_t* out, std::size_t stride) {
    if (setjmp(errors.back))
      return false;
    info.out_color_space = info.num_components == 1 ? JCS_GRAYSCALE : info.num_components == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_start_decompress(&info);
    while (info.output_scanline < info.output_height) {
      JSAMPROW row = out + info.output_scanline * stride;
      jpeg_read_scanlines(&info, &row, 1);
    }
    jpeg_finish_decompress(&info);
    return true;
  }
};

int orientation_of(const jpeg_decompress_struct& info) {
  constexpr char exif[] = "Exif\0"; // and the zero at its end: 6 bytes
  constexpr char xmp[] = "http://ns.adobe.com/xap/1.0/";
  std::vector<std::uint8_t> joined; // a block that is too large for one segment goes on in the next
  int second = 0;
  for (auto* marker = info.marker_list; marker != nullptr; marker = marker->next) {
    if (marker->marker != JPEG_APP0 + 1)
      continue;
    if (marker->data_length > sizeof exif && std::memcmp(marker->data, exif, sizeof exif) == 0)
      joined.insert(joined.end(), marker->data + sizeof exif, marker->data + marker->data_length);
    else if (marker->data_length > sizeof xmp && std::memcmp(marker->data, xmp, sizeof xmp) == 0)
      second = xmp_orientation({marker->data + sizeof xmp, marker->data_length - sizeof xmp});
  }
  const int found = exif_orientation({joined.data(), joined.size()});
  return found != 0 ? found : second;
}

// a * b / 255, rounded, for bytes.
int scaled(int a, int b) {
  const int t = a * b + 128;
  return ((t >> 8) + t) >> 8;
}

Image to_rgb(const std::vector<std::uint8_t>& raw, int height, int width, int components) {
  Image image(height, width);
  std::uint8_t* out = image.rgb.data();
  for (std::size_t at = 0; at < raw.size(); at += static_cast<std::size_t>(components), out += 3) {
    if (components == 1) {
      out[0] = out[1] = out[2] = raw[at];
      continue;
    }
    const int white = raw[at + 3]; // inverted: 255 is no ink
    for (std::size_t c = 0; c < 3; ++c)
      out[c] = static_cast<std::uint8_t>(white - scaled(255 - raw[at + c], white));
  }
  return image;
}

} // namespace

bool is_jpeg(Bytes file) noexcept {
  return file.size > 2 && file.data[0] == 0xFF && file.data[1] == 0xD8 && file.data[2] == 0xFF;
}

std::optional<Size> common_jpeg(Bytes file) {
  constexpr std::size_t tail = 4096; // some cameras append data
  constexpr std::uint8_t last[] = {0xFF, 0xD9}, several[] = {'M', 'P', 'F', 0};
  const std::uint8_t* end = file.data + file.size;
  if (!is_jpeg(file) || std::search(end - std::min(tail, file.size), end, last, last + 2) == end)
    return std::nullopt;
  const auto reader = std::make_unique<JpegReader>();
  if (!reader->header(file))
    return std::nullopt;
  const auto& info = reader->info;
  const bool known = info.jpeg_color_space == JCS_YCbCr || info.jpeg_color_space == JCS_GRAYSCALE;
  const std::uint8_t* scan = info.src->next_input_byte; // after the header
  if (!known || info.data_precision != 8 || info.arith_code || orientation_of(info) > 1 ||
      std::search(file.data, scan, several, several + 4) != scan || has_too_many_scans(file) ||
      static_cast<std::int64_t>(info.image_width) * info.image_height > max_pixels)
    return std::nullopt;
  return Size{static_cast<int>(info.image_height), static_cast<int>(info.image_width)};
}

Decoded read_jpeg(Bytes file, const std::string& name, std::int64_t most) {
  const auto reader = std::make_unique<JpegReader>();
  const auto damaged = [&] {
    return Error(ErrorKind::image, name + " is damaged or truncated: " + reader->errors.text + "; copy it again");
  };
  if (!reader->header(file))
    throw damaged();
  const auto& info = reader->info;
  check_pixels(info.image_width, info.image_height, name, most);
  if (has_too_many_scans(file))
    throw Error(ErrorKind::image, name + " has more than " + std::to_string(most_scans) +
                                      " scans, each of which goes through all pixels; save it again");
  const int components = info.num_components, height = static_cast<int>(info.image_height),
            width = static_cast<int>(info.image_width);
  if (components != 1 && components != 3 && components != 4)
    throw Error(ErrorKind::image, name + " has " + std::to_string(components) + " channels; allowed are 1, 3 and 4");
  const int orientation = orientation_of(info);
  const std::size_t stride = static_cast<std::size_t>(width) * static_cast<std::size_t>(components);
  Decoded decoded;
  decoded.orientation = orientation;
  if (components == 3) {
    decoded.image = Image(height, width);
    if (!reader->pixels(decoded.image.rgb.data(), stride))
      throw damaged();
    return decoded;
  }
  std::vector<std::uint8_t> raw(stride * static_cast<std::size_t>(height));
  if (!reader->pixels(raw.data(), stride))
    throw damaged();
  decoded.image = to_rgb(raw, height, width, components);
  return decoded;
}

namespace {

struct Writer {
  jpeg_compress_struct info{};
  Errors errors{};
  std::FILE* file = nullptr;
  bool made = false;

  ~Writer() {
    if (made)
      jpeg_destroy_compress(&info);
    if (file != nullptr)
      std::fclose(file);
  }

  bool write(const Image& image, int quality) {
    info.err = install(errors);
    if (setjmp(errors.back))
      return false;
    jpeg_create_compress(&info);
    made = true;
    jpeg_stdio_dest(&info, file);
    info.image_width = static_cast<JDIMENSION>(image.width);
    info.image_height = static_cast<JDIMENSION>(image.height);
    info.input_components = 3;
    info.in_color_space = JCS_RGB;
    jpeg_set_defaults(&info);
    jpeg_set_quality(&info, quality, TRUE);
    jpeg_start_compress(&info, TRUE);
    while (info.next_scanline < info.image_height) {
      auto* row = const_cast<std::uint8_t*>(image.rgb.data()) +
                  static_cast<std::size_t>(info.next_scanline) * static_cast<std::size_t>(image.width) * 3;
      jpeg_write_scanlines(&info, &row, 1);
    }
    jpeg_finish_compress(&info);
    return true;
  }
};

} // namespace

std::string write_jpeg(const Image& image, const std::filesystem::path& path, int quality) {
  const auto writer = std::make_unique<Writer>();
  writer->file = std::fopen(path.c_str(), "wb");
  bool ok = writer->file != nullptr && writer->write(image, quality);
  if (writer->file != nullptr) {
    ok = std::fclose(writer->file) == 0 && ok;
    writer->file = nullptr;
  }
  return ok ? "" : writer->errors.text[0] ? writer->errors.text : std::strerror(errno);
}

} // namespace detrt
