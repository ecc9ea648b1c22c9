#include "jpeg_decoder.hpp"

#ifdef DETRT_WITH_NVJPEG
#include <nvjpeg.h>
#endif

namespace detrt::gpu {

#ifdef DETRT_WITH_NVJPEG
namespace {

// Chroma is interpolated as libjpeg does it; without, pixels of 4:2:0 files differ by 48 levels and not by 1.
#ifdef NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION
constexpr unsigned int flags = NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION;
#else
constexpr unsigned int flags = 0;
#endif

// A library handle with the state of one decoding at a time.
class Backend {
public:
  explicit Backend(nvjpegBackend_t kind) {
    if (nvjpegCreateEx(kind, nullptr, nullptr, flags, &handle_) != NVJPEG_STATUS_SUCCESS)
      handle_ = nullptr;
    else if (nvjpegJpegStateCreate(handle_, &state_) != NVJPEG_STATUS_SUCCESS ||
             nvjpegJpegStreamCreate(handle_, &header_) != NVJPEG_STATUS_SUCCESS)
      close();
  }
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  ~Backend() { close(); }

  explicit operator bool() const noexcept { return handle_ != nullptr; }

  // Whether the file has this size, and is one for the JPEG engines.
  bool takes(const std::vector<std::uint8_t>& file) {
    int unsupported = 1;
    return nvjpegJpegStreamParseHeader(handle_, file.data(), file.size(), header_) == NVJPEG_STATUS_SUCCESS &&
           nvjpegDecodeBatchedSupported(handle_, header_, &unsupported) == NVJPEG_STATUS_SUCCESS && unsupported == 0;
  }
  bool by_engines(const std::vector<std::uint8_t>& file, nvjpegImage_t& image, cudaStream_t stream) {
    const unsigned char* data = file.data();
    const std::size_t size = file.size();
    return nvjpegDecodeBatchedInitialize(handle_, state_, 1, 1, NVJPEG_OUTPUT_RGBI) == NVJPEG_STATUS_SUCCESS &&
           nvjpegDecodeBatched(handle_, state_, &data, &size, &image, stream) == NVJPEG_STATUS_SUCCESS;
  }
  bool by_cores(const std::vector<std::uint8_t>& file, nvjpegImage_t& image, cudaStream_t stream) {
    return nvjpegDecode(handle_, state_, file.data(), file.size(), NVJPEG_OUTPUT_RGBI, &image, stream) ==
           NVJPEG_STATUS_SUCCESS;
  }
  bool has_size(const std::vector<std::uint8_t>& file, int height, int width) {
    int components = 0, widths[NVJPEG_MAX_COMPONENT], heights[NVJPEG_MAX_COMPONENT];
    nvjpegChromaSubsampling_t subsampling;
    return nvjpegGetImageInfo(handle_, file.data(), file.size(), &components, &subsampling, widths, heights) ==
               NVJPEG_STATUS_SUCCESS &&
           heights[0] == height && widths[0] == width;
  }

private:
  void close() {
    if (header_)
      (void)nvjpegJpegStreamDestroy(header_);
    if (state_)
      (void)nvjpegJpegStateDestroy(state_);
    if (handle_)
      (void)nvjpegDestroy(handle_);
    handle_ = nullptr;
    state_ = nullptr;
    header_ = nullptr;
  }
  nvjpegHandle_t handle_ = nullptr;
  nvjpegJpegState_t state_ = nullptr;
  nvjpegJpegStream_t header_ = nullptr;
};

class NvJpeg final : public JpegDecoder {
public:
  explicit operator bool() const noexcept { return static_cast<bool>(cores_); }

  bool decode(const std::vector<std::uint8_t>& file, int height, int width, std::uint8_t* pixels,
              cudaStream_t stream) override {
    if (!cores_.has_size(file, height, width))
      return false;
    nvjpegImage_t image{};
    image.channel[0] = pixels;
    image.pitch[0] = static_cast<unsigned int>(width) * 3;
    return (engines_ && engines_.takes(file) && engines_.by_engines(file, image, stream)) ||
           cores_.by_cores(file, image, stream);
  }

private:
  Backend engines_{NVJPEG_BACKEND_HARDWARE}, cores_{NVJPEG_BACKEND_DEFAULT};
};

} // namespace

bool has_jpeg_decoder() noexcept {
  return true;
}

std::unique_ptr<JpegDecoder> make_jpeg_decoder() {
  auto made = std::make_unique<NvJpeg>();
  if (!*made)
    return nullptr;
  return made;
}
#else
bool has_jpeg_decoder() noexcept {
  return false;
}

std::unique_ptr<JpegDecoder> make_jpeg_decoder() {
  return nullptr;
}
#endif

} // namespace detrt::gpu
