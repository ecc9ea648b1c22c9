// Host tensors, passed between preprocessing, sessions and post-processing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace detrt {

enum class DType { uint8, int32, int64, float16, bfloat16, float32, boolean };

std::size_t size_of(DType dtype) noexcept;
const char* name_of(DType dtype) noexcept;                      // as NumPy calls it: "uint8", "float32", ...
DType dtype_of(const std::string& name);                        // inverse of name_of; throws Error
std::string shape_text(const std::vector<std::int64_t>& shape); // "(1, 3, 416, 416)"

// Name, type and shape of an input or output. A symbolic axis has length -1 and its name in `axes`.
struct TensorInfo {
  std::string name;
  DType dtype = DType::float32;
  std::vector<std::int64_t> shape;
  std::vector<std::string> axes; // as long as shape, or empty
};

// A dense row-major array in host memory, aligned to 64 bytes, which it owns.
class Tensor {
public:
  Tensor() = default;
  // Zeros. Throws Error for a negative side or a size that does not fit into memory.
  Tensor(DType dtype, std::vector<std::int64_t> shape);
  Tensor(const Tensor& other);
  Tensor(Tensor&& other) noexcept;
  Tensor& operator=(Tensor other) noexcept;
  ~Tensor();

  DType dtype() const noexcept { return dtype_; }
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  std::int64_t elements() const noexcept { return elements_; }
  std::size_t bytes() const noexcept { return static_cast<std::size_t>(elements_) * size_of(dtype_); }
  void* data() noexcept { return data_; }
  const void* data() const noexcept { return data_; }

  // The elements as T; throws Error if T does not match the dtype.
  template <class T> T* as();
  template <class T> const T* as() const;

private:
  DType dtype_ = DType::uint8;
  std::vector<std::int64_t> shape_;
  std::int64_t elements_ = 0;
  void* data_ = nullptr;
};

extern template std::uint8_t* Tensor::as<std::uint8_t>();
extern template std::int32_t* Tensor::as<std::int32_t>();
extern template std::int64_t* Tensor::as<std::int64_t>();
extern template float* Tensor::as<float>();
extern template const std::uint8_t* Tensor::as<std::uint8_t>() const;
extern template const std::int32_t* Tensor::as<std::int32_t>() const;
extern template const std::int64_t* Tensor::as<std::int64_t>() const;
extern template const float* Tensor::as<float>() const;

using Tensors = std::map<std::string, Tensor>;

} // namespace detrt
