// detrt-pixels IMAGE [HEIGHT WIDTH FILTER]: the pixels of a file, or of its resized form, as "HEIGHT WIDTH\n" and
// bytes.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "detrt/error.hpp"
#include "detrt/image.hpp"

int main(int count, char** arguments) {
  try {
    if (count != 2 && count != 5)
      throw detrt::Error(detrt::ErrorKind::usage,
                         "give an image, or an image, a height, a width and the number of a filter");
    detrt::Image image = detrt::load_image(arguments[1]);
    if (count == 5)
      image = detrt::resize_image(image, {std::atoi(arguments[2]), std::atoi(arguments[3])},
                                  static_cast<detrt::Resample>(std::atoi(arguments[4])));
    std::printf("%d %d\n", image.height, image.width);
    return std::fwrite(image.rgb.data(), 1, image.rgb.size(), stdout) == image.rgb.size() ? 0 : 1;
  } catch (const detrt::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
