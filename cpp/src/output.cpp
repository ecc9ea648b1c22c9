// The JSON line of one image, character for character as Python's json.dumps(..., ensure_ascii=False) writes it.
#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "detrt/detections.hpp"
#include "text.hpp"

namespace detrt {
namespace {

// Python's repr of round(value, digits): rounded exactly, then the shortest text that reads back as the same number.
std::string rounded(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  const double number = std::strtod(text, nullptr);
  const bool plain = number == 0 || (number >= 1e-4 && number < 1e16) || (number <= -1e-4 && number > -1e16);
  const auto form = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const std::to_chars_result end = std::to_chars(text, text + sizeof text, number, form);
  std::string made(text, end.ptr);
  return plain && made.find('.') == std::string::npos ? made + ".0" : made;
}

void append_escape(std::string& out, unsigned code) {
  char text[8];
  std::snprintf(text, sizeof text, "\\u%04x", code);
  out += text;
}

} // namespace

std::size_t utf8_length(const std::string& text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(at);
  const std::size_t length = lead < 0x80                    ? 1
                             : lead >= 0xC2 && lead <= 0xDF ? 2
                             : lead >= 0xE0 && lead <= 0xEF ? 3
                             : lead >= 0xF0 && lead <= 0xF4 ? 4
                                                            : 0;
  if (length == 0 || at + length > text.size())
    return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xC0) != 0x80)
      return 0;
  if (length < 3)
    return length;
  const unsigned second = byte(at + 1); // no overlong forms, no surrogates, nothing above U+10FFFF
  const bool wrong = (lead == 0xE0 && second < 0xA0) || (lead == 0xED && second > 0x9F) ||
                     (lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second > 0x8F);
  return wrong ? 0 : length;
}

std::string json_text(const std::string& text) {
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const std::size_t length = utf8_length(text, i);
    if (length == 0)
      append_escape(out, 0xDC00u + byte); // a file name that is not UTF-8: Python's surrogate escape
    else if (byte == '"' || byte == '\\')
      (out += '\\') += static_cast<char>(byte);
    else if (byte == '\n')
      out += "\\n";
    else if (byte == '\r')
      out += "\\r";
    else if (byte == '\t')
      out += "\\t";
    else if (byte == '\b')
      out += "\\b";
    else if (byte == '\f')
      out += "\\f";
    else if (byte < 0x20)
      append_escape(out, byte);
    else
      out.append(text, i, length);
    i += length == 0 ? 1 : length;
  }
  return out + "\"";
}

std::string to_json(const Detections& detections, const std::string& image) {
  std::string out = "{\"image\": " + json_text(image);
  if (!detections.prompt.empty())
    out += ", \"prompt\": " + json_text(detections.prompt);
  out += ", \"width\": " + std::to_string(detections.image_size.width);
  out += ", \"height\": " + std::to_string(detections.image_size.height) + ", \"detections\": [";
  bool first = true;
  for (const Detection& d : detections.found) {
    out += (first ? "{\"label\": " : ", {\"label\": ") + json_text(d.label);
    out +=
        ", \"class_id\": " + std::to_string(d.class_id) + ", \"score\": " + rounded(d.score, 6) + ", \"box_xyxy\": [";
    for (std::size_t i = 0; i < 4; ++i)
      out += (i ? ", " : "") + rounded(d.box_xyxy[i], 3);
    out += "]";
    if (d.phrase_span)
      out += ", \"phrase_span\": [" + std::to_string(d.phrase_span->first) + ", " +
             std::to_string(d.phrase_span->second) + "]";
    if (d.mask)
      out += ", \"segmentation\": {\"size\": [" + std::to_string(detections.image_size.height) + ", " +
             std::to_string(detections.image_size.width) + "], \"counts\": " + json_text(coco_counts(*d.mask)) + "}";
    out += "}";
    first = false;
  }
  return out + "]}";
}

} // namespace detrt
