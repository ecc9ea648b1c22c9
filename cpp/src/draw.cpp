#include "detrt/draw.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>

#include <stb/stb_easy_font.h>

#include "detrt/error.hpp"
#include "text.hpp"

namespace detrt {
namespace {

using Colour = std::array<std::uint8_t, 3>;

// Hues of neighbours differ strongly, and all are visible on a dark image; as in draw.py.
constexpr std::uint32_t palette[] = {0xff4d4d, 0x2e9bff, 0x3ddc4b, 0xffb300, 0xb45cff, 0x00d5d5, 0xff5cc0, 0xb3e000,
                                     0xff7a1a, 0x5b6bff, 0x00c78a, 0xf2e205, 0xe0409a, 0x7fd1ff, 0xc98a5b, 0x9be08f};
struct Tint {
  int towards;
  double share;
};
constexpr Tint tints[] = {{0, 0.0}, {255, 0.45}, {0, 0.35}, {128, 0.5}, {255, 0.7}};
constexpr std::size_t longest_name = 100; // letters; more would not fit into an image
constexpr int letter_height = 8;          // of stb_easy_font, in its own pixels

struct Box {
  int x0, y0, x1, y1; // inclusive
};

void fill(Image& image, Box box, Colour colour) {
  for (int y = std::max(0, box.y0); y <= std::min(image.height - 1, box.y1); ++y)
    for (int x = std::max(0, box.x0); x <= std::min(image.width - 1, box.x1); ++x)
      std::copy(colour.begin(), colour.end(),
                image.rgb.begin() + (static_cast<std::ptrdiff_t>(y) * image.width + x) * 3);
}

void outline(Image& image, Box box, Colour colour, int line) {
  fill(image, {box.x0, box.y0, box.x1, std::min(box.y1, box.y0 + line - 1)}, colour);
  fill(image, {box.x0, std::max(box.y0, box.y1 - line + 1), box.x1, box.y1}, colour);
  fill(image, {box.x0, box.y0, std::min(box.x1, box.x0 + line - 1), box.y1}, colour);
  fill(image, {std::max(box.x0, box.x1 - line + 1), box.y0, box.x1, box.y1}, colour);
}

// The pixels of a mask, mixed with a colour; as in draw.py.
void mix(Image& image, const Runs& runs, Colour colour) {
  constexpr double opacity = 0.45;
  std::int64_t at = 0;
  for (std::size_t i = 0; i < runs.size(); ++i)
    for (const std::int64_t end = at + runs[i]; at < end; ++at)
      for (std::size_t c = 0; c < 3 && i % 2 == 1; ++c) {
        const std::int64_t pixel = at % image.height * image.width + at / image.height;
        std::uint8_t& value = image.rgb[static_cast<std::size_t>(pixel) * 3 + c];
        value = static_cast<std::uint8_t>(std::nearbyint(value * (1 - opacity) + colour[c] * opacity));
      }
}

Box whole_pixels(const std::array<float, 4>& box, Size size) {
  const auto rounded = [](float v) { return static_cast<int>(std::floor(v + 0.5f)); };
  const int x0 = std::clamp(rounded(box[0]), 0, size.width - 1), y0 = std::clamp(rounded(box[1]), 0, size.height - 1);
  return {x0, y0, std::min(std::max(rounded(box[2]) - 1, x0), size.width - 1),
          std::min(std::max(rounded(box[3]) - 1, y0), size.height - 1)};
}

std::string ascii(const std::string& text) {
  std::string made;
  for (std::size_t i = 0; i < text.size() && made.size() < longest_name;) {
    const std::size_t length = utf8_length(text, i);
    const char c = text[i];
    made += length != 1 ? '?' : c >= ' ' && c < 127 ? c : ' ';
    i += length == 0 ? 1 : length;
  }
  return made;
}

void print(Image& image, int x, int y, std::string text, int scale, Colour colour) {
  std::vector<char> quads(text.size() * 300 + 64);
  const int count = stb_easy_font_print(0, 0, text.data(), nullptr, quads.data(), static_cast<int>(quads.size()));
  for (int i = 0; i < count; ++i) {
    float corner[2][2]; // of a quad the first and the third vertex; a vertex has x, y, z and a colour
    for (int k = 0; k < 2; ++k)
      std::memcpy(corner[k], quads.data() + (i * 4 + k * 2) * 16, sizeof corner[k]);
    const auto at = [scale](float v) { return static_cast<int>(v) * scale; };
    fill(image, {x + at(corner[0][0]), y + at(corner[0][1]), x + at(corner[1][0]) - 1, y + at(corner[1][1]) - 1},
         colour);
  }
}

bool overlap(const Box& a, const Box& b) {
  return a.x0 <= b.x1 && b.x0 <= a.x1 && a.y0 <= b.y1 && b.y0 <= a.y1;
}

struct Label {
  std::string text;
  Box area;
};

// The label in the longest form that fits, at the first free position; nothing if none fits.
std::optional<Label> place(const Detection& d, Box box, int scale, int pad, Size size, const std::vector<Box>& taken) {
  char score[16];
  std::snprintf(score, sizeof score, " %.2f", static_cast<double>(d.score));
  const std::string name = ascii(d.label);
  std::vector<std::string> forms{name + score, name};
  for (std::size_t length = name.size(); length-- > 2;)
    forms.push_back(name.substr(0, length) + ".");
  for (std::string& text : forms) {
    const int w = stb_easy_font_width(text.data()) * scale + 2 * pad, h = letter_height * scale + 2 * pad;
    if (w > size.width || h > size.height)
      continue;
    std::vector<Box> places;
    for (int left : {box.x0, box.x1 - w + 1}) {
      const int x = std::clamp(left, 0, size.width - w);
      for (int y :
           {box.y0 - h, box.y0, box.y1 + 1, box.y1 - h + 1}) // above, inside at the top, below, inside at the bottom
        if (y >= 0 && y <= size.height - h)
          places.push_back({x, y, x + w - 1, y + h - 1});
    }
    const auto free = std::find_if(places.begin(), places.end(), [&](const Box& p) {
      return std::none_of(taken.begin(), taken.end(), [&](const Box& other) { return overlap(p, other); });
    });
    if (places.empty())
      places.push_back({0, 0, w - 1, h - 1});
    return Label{text, free == places.end() || places.size() == 1 ? places.front() : *free};
  }
  return std::nullopt;
}

} // namespace

Colour class_colour(std::int64_t class_id) {
  constexpr std::int64_t hues = std::size(palette), tones = std::size(tints);
  const std::uint32_t rgb = palette[((class_id % hues) + hues) % hues];
  const std::int64_t turn = class_id / hues - (class_id % hues < 0);
  const Tint tint = tints[((turn % tones) + tones) % tones];
  Colour colour;
  for (std::size_t c = 0; c < 3; ++c) {
    const int value = static_cast<int>(rgb >> (16 - 8 * c) & 0xFF);
    colour[c] = static_cast<std::uint8_t>(std::nearbyint(value + (tint.towards - value) * tint.share));
  }
  return colour;
}

Image draw_detections(const Image& image, const Detections& detections) {
  if (image.size() != detections.image_size)
    throw Error(ErrorKind::image, "the detections are of an image of another size; give the image that they belong to");
  Image canvas = image;
  const double scale = std::sqrt(static_cast<double>(image.width) * image.height);
  const int line = std::max(1, static_cast<int>(std::lround(scale / 280)));
  const int letters = std::max(1, static_cast<int>(std::lround(scale / 40 / letter_height)));
  const auto& found = detections.found;
  std::vector<Box> taken;
  std::vector<std::optional<Label>> labels;
  for (const Detection& d : found) { // the best label is placed first and painted last
    labels.push_back(place(d, whole_pixels(d.box_xyxy, image.size()), letters, std::max(2, line), image.size(), taken));
    if (labels.back())
      taken.push_back(labels.back()->area);
  }
  for (std::size_t i = found.size(); i-- > 0;)
    if (found[i].mask)
      mix(canvas, *found[i].mask, class_colour(found[i].class_id));
  for (std::size_t i = found.size(); i-- > 0;) {
    const Box box = whole_pixels(found[i].box_xyxy, image.size());
    const Colour colour = class_colour(found[i].class_id);
    const auto dark = [](std::uint8_t c) { return static_cast<std::uint8_t>(c / 4); };
    if (line > 1) // a dark rim keeps the line visible on objects of its colour
      outline(canvas, {box.x0 - 1, box.y0 - 1, box.x1 + 1, box.y1 + 1},
              {dark(colour[0]), dark(colour[1]), dark(colour[2])}, line + 2);
    outline(canvas, box, colour, line);
  }
  for (std::size_t i = found.size(); i-- > 0;) {
    if (!labels[i])
      continue;
    const Colour colour = class_colour(found[i].class_id);
    const bool bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 120;
    fill(canvas, labels[i]->area, colour);
    const int pad = std::max(2, line);
    const std::uint8_t ink = bright ? 0 : 255;
    print(canvas, labels[i]->area.x0 + pad, labels[i]->area.y0 + pad, labels[i]->text, letters, {ink, ink, ink});
  }
  return canvas;
}

} // namespace detrt
