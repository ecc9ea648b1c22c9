// count_objects BUNDLE IMAGE...: how many objects of each class are in the images.
#include <iostream>
#include <map>

#include <detrt/detector.hpp>
#include <detrt/error.hpp>

int main(int count, char** arguments) {
  if (count < 3) {
    std::cerr << "usage: count_objects BUNDLE IMAGE...\n";
    return 2;
  }
  try {
    detrt::DetectorOptions options;
    options.threshold = 0.4;
    const detrt::Detector detector = detrt::Detector::open(arguments[1], options);
    std::map<std::string, int> counts;
    for (int i = 2; i < count; ++i)
      for (const detrt::Detections& detections : detector(std::vector<detrt::Image>{detrt::load_image(arguments[i])}))
        for (const detrt::Detection& found : detections.found)
          ++counts[found.label];
    for (const auto& [label, number] : counts)
      std::cout << label << ": " << number << "\n";
  } catch (const detrt::Error& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
