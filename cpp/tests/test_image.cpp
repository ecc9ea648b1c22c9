#include <filesystem>

#include <unistd.h>

#include "codecs.hpp"
#include "detrt/draw.hpp"
#include "detrt/image.hpp"
#include "support.hpp"
#include "unfinished.hpp"

namespace {

namespace fs = std::filesystem;

detrt::Image gradient(int height, int width) {
  return image_of({{"shape", {height, width, 3}}, {"gradient", {5, 3, 80}}});
}

std::string content(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string decode_error(const std::string& bytes) {
  return error_of([&] { detrt::decode_image(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()); });
}

} // namespace

TEST_CASE("PNG comes back as it was, JPEG nearly") {
  const Folder folder("image");
  const detrt::Image image = gradient(40, 61);
  detrt::save_image(image, folder.path / "sub/a.png");
  CHECK(detrt::load_image(folder.path / "sub/a.png").rgb == image.rgb);
  detrt::save_image(image, folder.path / "a.jpg");
  CHECK(detrt::load_image(folder.path / "a.jpg").size() == image.size());
  CHECK_ERROR(detrt::save_image(image, folder.path / "a.bmp"), "must end with .jpg, .jpeg or .png");
  CHECK_ERROR(detrt::save_image(image, "/proc/none/a.png"), "cannot write '/proc/none/");
  fs::create_directory(folder.path / "b.png");
  CHECK_ERROR(detrt::save_image(image, folder.path / "b.png"), "cannot write");
  for (const auto& entry : fs::directory_iterator(folder.path))
    CHECK(entry.path().extension() != ".tmp");
}

TEST_CASE("what a killed process left of a file is removed, and what is in use is not") {
  const Folder folder("image");
  const fs::path path = folder.path / "a.png", dead = folder.path / ".a.png.0.tmp", other = folder.path / "other";
  const detrt::Image image = gradient(4, 6);
  std::ofstream(dead) << "of a killed process";
  detrt::save_image(image, path);
  CHECK_FALSE(fs::exists(dead));
  {
    const detrt::Unfinished used(path);
    CHECK(used.path() == dead);
    detrt::save_image(image, path);
    CHECK(fs::exists(dead));
  }
  CHECK_FALSE(fs::exists(dead));
  std::ofstream(other) << "theirs";
  fs::create_symlink(other, dead);
  detrt::save_image(image, path);
  CHECK(fs::is_symlink(dead));
  CHECK(content(other) == "theirs");
  CHECK(detrt::load_image(path).rgb == image.rgb);
}

TEST_CASE("files that are no good images are refused") {
  const Folder folder("image");
  CHECK_ERROR(detrt::load_image(folder.path / "none.jpg"), "there is no file");
  CHECK_ERROR(detrt::load_image(folder.path), "is a folder");
  CHECK_ERROR(detrt::load_image(""), "is '' (empty)");
  CHECK(decode_error("").find("is empty (0 bytes)") != std::string::npos);
  CHECK(decode_error("GIF89a.....").find("is not a JPEG, PNG or binary PNM image (P5, P6)") != std::string::npos);
  detrt::save_image(gradient(64, 64), folder.path / "a.png");
  detrt::save_image(gradient(64, 64), folder.path / "a.jpg");
  for (const char* name : {"a.png", "a.jpg"}) {
    const std::string whole = content(folder.path / name);
    for (std::size_t length : {whole.size() / 8, whole.size() / 2, whole.size() - 30})
      CHECK_MESSAGE(decode_error(whole.substr(0, length)).find("is damaged or truncated") != std::string::npos, name, " ",
                    length);
  }
  const auto* png = "\x89PNG\r\n\x1a\n\0\0\0\rIHDR\x7f\xff\xff\xff\x7f\xff\xff\xff\x08\x02\0\0\0";
  const std::string header(png, 8 + 8 + 13);
  const std::string crc("\xe8\xee\x6d\x7a", 4); // any; libpng reports a wrong one
  CHECK(!decode_error(header + crc).empty());
  CHECK(decode_error("P6 200000 200000 255\n").find("is too large: 200000x200000") != std::string::npos);
  CHECK(decode_error("P6 0 2 255\n").find("has no pixels") != std::string::npos);
  CHECK(decode_error("P6 2 2 255\n12345").find("truncated") != std::string::npos);
  CHECK(decode_error("P6 2 2 65535\n").find("of PNM only 255") != std::string::npos);
  CHECK(decode_error("P5 1 1 255\n7").empty());
}

TEST_CASE("EXIF and XMP orientations are found") {
  const unsigned char little[] = {'I', 'I', 42, 0, 8, 0, 0, 0, 1, 0, 0x12, 1, 3, 0, 1, 0, 0, 0, 6, 0, 0, 0};
  CHECK(detrt::exif_orientation({little, sizeof little}) == 6);
  for (std::size_t length = 0; length < sizeof little; ++length)
    CHECK(detrt::exif_orientation({little, length}) == 0);
  const unsigned char big[] = {'M', 'M', 0, 42, 0, 0, 0, 8, 0, 1, 1, 0x12, 0, 3, 0, 0, 0, 1, 0, 8, 0, 0};
  CHECK(detrt::exif_orientation({big, sizeof big}) == 8);
  const std::string xmp = "<x tiff:Orientation=\"3\"/>", element = "<tiff:Orientation>5</tiff:Orientation>";
  CHECK(detrt::xmp_orientation({reinterpret_cast<const std::uint8_t*>(xmp.data()), xmp.size()}) == 3);
  CHECK(detrt::xmp_orientation({reinterpret_cast<const std::uint8_t*>(element.data()), element.size()}) == 5);
  CHECK(detrt::xmp_orientation({reinterpret_cast<const std::uint8_t*>(xmp.data()), 18}) == 0);
}

TEST_CASE("folders are searched in natural order") {
  const Folder folder("image");
  for (const char* name : {"img10.png", "img2.png", "sub/img1.JPG", "sub/a.webp", "b.TIFF", "c.tiff", "d.mp4", ".hidden/a.png", ".x.png", "note.txt"}) {
    fs::create_directories((folder.path / name).parent_path());
    std::ofstream(folder.path / name) << "x";
  }
  fs::create_symlink("nothing", folder.path / "sub/dead.jpg"); // named as one that cannot be read
  fs::create_symlink("round.jpg", folder.path / "sub/round.jpg");
  std::map<std::string, std::size_t> left_out;
  const auto found = detrt::expand_inputs({folder.path.string()}, &left_out);
  CHECK(left_out == std::map<std::string, std::size_t>{{".webp", 1}, {".tiff", 2}, {".mp4", 1}});
  REQUIRE(found.size() == 5);
  CHECK(found[0].filename() == "img2.png");
  CHECK(found[1].filename() == "img10.png");
  CHECK(found[2].filename() == "dead.jpg");
  CHECK(found[3].filename() == "img1.JPG");
  CHECK(found[4].filename() == "round.jpg");
  CHECK(detrt::expand_inputs({(folder.path / "note.txt").string()}).size() == 1);
  CHECK_ERROR(detrt::expand_inputs({(folder.path / "none").string()}), "there is no file");
  CHECK_ERROR(detrt::expand_inputs({""}), "is '' (empty)");
  fs::create_directory(folder.path / "empty");
  CHECK_ERROR(detrt::expand_inputs({(folder.path / "empty").string()}), "has no images");
}

TEST_CASE("boxes and labels are drawn inside the image") {
  detrt::Detections detections;
  detections.image_size = {120, 160};
  detections.found = {{{10, 20, 90, 100}, 0.9f, 1, "dog", {}},
                      {{-5, -5, 500, 500}, 0.5f, 17, "caf\xc3\xa9", {}},
                      {{159, 119, 160, 120}, 0.4f, -3, "", {}}};
  detrt::Image image(120, 160);
  const detrt::Image drawn = detrt::draw_detections(image, detections);
  const auto pixel = [&](int y, int x) {
    const auto at = drawn.rgb.begin() + (y * 160 + x) * 3;
    return std::array<std::uint8_t, 3>{at[0], at[1], at[2]};
  };
  CHECK(pixel(60, 10) == detrt::class_colour(1)); // the left side of the first box
  CHECK(pixel(60, 50) == std::array<std::uint8_t, 3>{0, 0, 0});
  CHECK(detrt::class_colour(1) == std::array<std::uint8_t, 3>{0x2e, 0x9b, 0xff}); // as in Python
  detections.image_size = {1, 1};
  CHECK_ERROR(detrt::draw_detections(image, detections), "of another size");
  detections.found.resize(1);
  detections.found[0].box_xyxy = {0, 0, 1, 1};
  CHECK(detrt::draw_detections(detrt::Image(1, 1), detections).rgb.size() == 3); // no room for a label
}
