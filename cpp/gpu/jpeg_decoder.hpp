// JPEG files to pixels on a GPU with nvJPEG: by the GPU's JPEG engines where it has them, else by its cores.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

namespace detrt::gpu {

class JpegDecoder {
public:
  virtual ~JpegDecoder() = default;
  // Enqueues the decoding of a file to RGB at `pixels` on the device, height * width * 3 bytes. false: it cannot. The stream must
  // have done it before the file goes, and before the next call.
  virtual bool decode(const std::vector<std::uint8_t>& file, int height, int width, std::uint8_t* pixels,
                      cudaStream_t stream) = 0;
};

bool has_jpeg_decoder() noexcept; // whether libdetrt was built with nvJPEG
// For the current device. nullptr: there is no nvJPEG, or it does not work here.
std::unique_ptr<JpegDecoder> make_jpeg_decoder();

} // namespace detrt::gpu
