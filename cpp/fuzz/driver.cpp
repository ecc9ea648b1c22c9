// A small driver for compilers without libFuzzer: fuzz-TARGET [--runs N] [--seconds S] [--seed N] SEED_FILE...
// The same arguments give the same inputs. Sanitizers end the program at the first fault; every input
// is written before its run, so that the failing one is saved.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;

class Mutator {
public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  Bytes operator()(const std::vector<Bytes>& seeds) {
    Bytes bytes = seeds[below(seeds.size())];
    for (std::size_t i = 1 + below(8); i > 0 && !bytes.empty(); --i)
      change(bytes, seeds);
    return bytes;
  }

private:
  std::size_t below(std::size_t limit) { return limit == 0 ? 0 : static_cast<std::size_t>(random_() % limit); }

  void change(Bytes& bytes, const std::vector<Bytes>& seeds) {
    const std::size_t at = below(bytes.size());
    const auto place = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const std::size_t length = 1 + below(std::min<std::size_t>(bytes.size() - at, 64));
    switch (below(8)) {
    case 0:
      *place = static_cast<std::uint8_t>(*place ^ (1u << below(8)));
      break;
    case 1:
      *place = static_cast<std::uint8_t>(below(256));
      break;
    case 2: { // a number that is often at an edge
      static constexpr std::uint32_t edges[] = {0,      1,      0x7F,       0x80,       0xFF,      0x7FFF,
                                                0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF};
      const std::uint32_t value = edges[below(std::size(edges))];
      std::memcpy(&*place, &value, std::min<std::size_t>(sizeof value, bytes.size() - at));
      break;
    }
    case 3:
      bytes.erase(place, place + static_cast<std::ptrdiff_t>(length));
      break;
    case 4: {
      const Bytes copy(place, place + static_cast<std::ptrdiff_t>(length));
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(below(bytes.size())), copy.begin(), copy.end());
      break;
    }
    case 5:
      bytes.resize(at);
      break;
    case 6: { // digits, so that numbers in text change
      for (std::size_t i = 0; i < bytes.size() - at; ++i)
        if (bytes[at + i] >= '0' && bytes[at + i] <= '9') {
          bytes[at + i] = static_cast<std::uint8_t>('0' + below(10));
          break;
        }
      break;
    }
    default: { // the rest of another seed
      const Bytes& other = seeds[below(seeds.size())];
      const std::size_t from = below(other.size());
      bytes.resize(at);
      bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(from), other.end());
    }
    }
  }

  std::mt19937_64 random_;
};

} // namespace

int main(int count, char** arguments) {
  long runs = 1000;
  double seconds = 1e9;
  std::uint64_t seed = 1;
  std::vector<Bytes> seeds;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    if (name == "--runs" && i + 1 < count)
      runs = std::atol(arguments[++i]);
    else if (name == "--seconds" && i + 1 < count)
      seconds = std::atof(arguments[++i]);
    else if (name == "--seed" && i + 1 < count)
      seed = static_cast<std::uint64_t>(std::atoll(arguments[++i]));
    else {
      std::ifstream file(name, std::ios::binary);
      seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
      if (!file || seeds.back().empty()) {
        std::fprintf(stderr, "'%s' cannot be read as a seed\n", name.c_str());
        return 2;
      }
    }
  }
  if (seeds.empty()) {
    std::fprintf(stderr, "give at least one seed file\n");
    return 2;
  }
  for (const Bytes& bytes : seeds)
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  Mutator mutate(seed);
  const char* keep = std::getenv("DETRT_FUZZ_KEEP"); // file for the input of the current run
  const auto start = std::chrono::steady_clock::now();
  long done = 0;
  for (; done < runs && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds;
       ++done) {
    const Bytes bytes = mutate(seeds);
    if (keep != nullptr)
      std::ofstream(keep, std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld runs, no fault\n", done);
  return 0;
}
