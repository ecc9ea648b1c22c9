#include "data_locations.hpp"

#include <cstdint>
#include <set>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "detrt/error.hpp"

namespace detrt {
namespace fs = std::filesystem;
namespace {

enum class Message { model, training, graph, function, node, attribute, sparse, tensor, external };

struct Way {
  Message from;
  std::uint64_t number; // of the field
  Message to;
};
// Fields in onnx.proto: the ways from a model to the values of its tensors.
constexpr Way ways[] = {
    {Message::model, 7, Message::graph},       {Message::model, 20, Message::training},
    {Message::model, 25, Message::function},   {Message::training, 1, Message::graph},
    {Message::training, 2, Message::graph},    {Message::graph, 1, Message::node},
    {Message::graph, 5, Message::tensor},      {Message::graph, 15, Message::sparse},
    {Message::function, 7, Message::node},     {Message::function, 11, Message::attribute},
    {Message::node, 5, Message::attribute},    {Message::attribute, 5, Message::tensor},
    {Message::attribute, 6, Message::graph},   {Message::attribute, 10, Message::tensor},
    {Message::attribute, 11, Message::graph},  {Message::attribute, 22, Message::sparse},
    {Message::attribute, 23, Message::sparse}, {Message::sparse, 1, Message::tensor},
    {Message::sparse, 2, Message::tensor},     {Message::tensor, 13, Message::external},
};
constexpr std::uint64_t entry_key = 1, entry_value = 2; // fields of an entry of external_data

// A message in the bytes of a file: its fields that have a length.
class Reader {
public:
  Reader(std::string_view bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  // The next field, or false at the end.
  bool next(std::uint64_t& number, std::string_view& content) {
    while (at_ < bytes_.size()) {
      const std::uint64_t tag = integer();
      switch (tag & 7) {
      case 0:
        integer();
        break;
      case 1:
        skip(8);
        break;
      case 5:
        skip(4);
        break;
      case 2: {
        const std::uint64_t length = integer();
        const std::size_t start = at_;
        skip(length);
        number = tag >> 3;
        content = bytes_.substr(start, static_cast<std::size_t>(length));
        return true;
      }
      default:
        fail("a field of type " + std::to_string(tag & 7));
      }
    }
    return false;
  }

private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorKind::spec, "'" + name_ + "' is no ONNX file that can be read (" + what +
                                     "); build the bundle again with detrt build");
  }
  void skip(std::uint64_t count) {
    if (count > bytes_.size() - at_)
      fail("a field is longer than its message");
    at_ += static_cast<std::size_t>(count);
  }
  std::uint64_t integer() {
    std::uint64_t found = 0;
    for (unsigned shift = 0; shift < 70 && at_ < bytes_.size(); shift += 7) {
      const auto byte = static_cast<std::uint8_t>(bytes_[at_++]);
      if (shift < 64)
        found |= static_cast<std::uint64_t>(byte & 127) << shift;
      if (byte < 128)
        return found;
    }
    fail("a number without an end");
  }

  std::string_view bytes_;
  std::size_t at_ = 0;
  const std::string& name_;
};

// The content of a file, mapped: it may be larger than the memory.
class Mapped {
public:
  explicit Mapped(const fs::path& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts {};
    const bool ok = file >= 0 && ::fstat(file, &facts) == 0;
    if (ok && facts.st_size > 0) {
      size_ = static_cast<std::size_t>(facts.st_size);
      void* const there = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
      start_ = there == MAP_FAILED ? nullptr : there;
    }
    if (file >= 0)
      ::close(file);
    if (!ok || (size_ > 0 && start_ == nullptr))
      throw Error(ErrorKind::spec, "'" + path.string() + "' cannot be read; check its permissions");
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  ~Mapped() {
    if (start_ != nullptr)
      ::munmap(start_, size_);
  }
  std::string_view content() const { return {static_cast<const char*>(start_), size_}; }

private:
  void* start_ = nullptr;
  std::size_t size_ = 0;
};

} // namespace

std::vector<std::string> data_locations(const fs::path& path) {
  const Mapped file(path);
  return data_locations(file.content(), path.string());
}

std::vector<std::string> data_locations(std::string_view content, const std::string& name) {
  std::set<std::string> found;
  if (content.find("location") == std::string_view::npos) // the key of every name
    return {};
  std::vector<std::pair<Message, std::string_view>> waiting{{Message::model, content}};
  while (!waiting.empty()) {
    const auto [kind, bytes] = waiting.back();
    waiting.pop_back();
    Reader reader(bytes, name);
    std::uint64_t number = 0;
    std::string_view part, keyword, text;
    while (reader.next(number, part)) {
      if (kind == Message::external) {
        if (number == entry_key)
          keyword = part;
        else if (number == entry_value)
          text = part;
        continue;
      }
      for (const Way& way : ways)
        if (way.from == kind && way.number == number)
          waiting.emplace_back(way.to, part);
    }
    if (kind == Message::external && keyword == "location")
      found.emplace(text);
  }
  return {found.begin(), found.end()};
}

} // namespace detrt
