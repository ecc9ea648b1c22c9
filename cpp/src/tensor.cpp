#include "detrt/tensor.hpp"

#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "detrt/error.hpp"

namespace detrt {
namespace {

constexpr std::align_val_t alignment{64};

struct Row {
  DType dtype;
  std::size_t size;
  const char* name;
};
constexpr Row rows[] = {{DType::uint8, 1, "uint8"},       {DType::int32, 4, "int32"},
                        {DType::int64, 8, "int64"},       {DType::float16, 2, "float16"},
                        {DType::bfloat16, 2, "bfloat16"}, {DType::float32, 4, "float32"},
                        {DType::boolean, 1, "bool"}};

const Row& row_of(DType dtype) noexcept {
  return rows[static_cast<std::size_t>(dtype)];
}

void check_type(bool suits, DType dtype) {
  if (!suits)
    throw Error(ErrorKind::session, std::string("a tensor of ") + name_of(dtype) + " was read as another type");
}

template <class T> bool suits(DType dtype);
template <> bool suits<std::uint8_t>(DType d) {
  return d == DType::uint8 || d == DType::boolean;
}
template <> bool suits<std::int32_t>(DType d) {
  return d == DType::int32;
}
template <> bool suits<std::int64_t>(DType d) {
  return d == DType::int64;
}
template <> bool suits<float>(DType d) {
  return d == DType::float32;
}

} // namespace

std::size_t size_of(DType dtype) noexcept {
  return row_of(dtype).size;
}
const char* name_of(DType dtype) noexcept {
  return row_of(dtype).name;
}

DType dtype_of(const std::string& name) {
  for (const Row& row : rows)
    if (name == row.name)
      return row.dtype;
  throw Error(ErrorKind::spec, "tensors of type '" + name +
                                   "' are not known; allowed: uint8, int32, int64, float16, "
                                   "bfloat16, float32, bool");
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  return text + (shape.size() == 1 ? ",)" : ")");
}

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape) : dtype_(dtype), shape_(std::move(shape)), elements_(1) {
  const auto most = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t side : shape_) {
    if (side < 0 || (side > 0 && elements_ > most / side))
      throw Error(ErrorKind::session, "a tensor of shape " + shape_text(shape_) + " cannot be made");
    elements_ *= side;
  }
  if (elements_ == 0)
    return;
  data_ = ::operator new(bytes(), alignment, std::nothrow);
  if (data_ == nullptr)
    throw Error(ErrorKind::session, "not enough memory for a tensor of shape " + shape_text(shape_) + " (" +
                                        std::to_string(bytes() >> 20) + " MiB); use a smaller batch or size");
  std::memset(data_, 0, bytes());
}

Tensor::Tensor(const Tensor& other) : Tensor(other.dtype_, other.shape_) {
  if (data_ != nullptr)
    std::memcpy(data_, other.data_, bytes());
}

Tensor::Tensor(Tensor&& other) noexcept
    : dtype_(other.dtype_), shape_(std::move(other.shape_)), elements_(std::exchange(other.elements_, 0)),
      data_(std::exchange(other.data_, nullptr)) {}

Tensor& Tensor::operator=(Tensor other) noexcept {
  std::swap(dtype_, other.dtype_);
  std::swap(shape_, other.shape_);
  std::swap(elements_, other.elements_);
  std::swap(data_, other.data_);
  return *this;
}

Tensor::~Tensor() {
  ::operator delete(data_, alignment);
}

template <class T> T* Tensor::as() {
  check_type(suits<T>(dtype_), dtype_);
  return static_cast<T*>(data_);
}
template <class T> const T* Tensor::as() const {
  check_type(suits<T>(dtype_), dtype_);
  return static_cast<const T*>(data_);
}

template std::uint8_t* Tensor::as<std::uint8_t>();
template std::int32_t* Tensor::as<std::int32_t>();
template std::int64_t* Tensor::as<std::int64_t>();
template float* Tensor::as<float>();
template const std::uint8_t* Tensor::as<std::uint8_t>() const;
template const std::int32_t* Tensor::as<std::int32_t>() const;
template const std::int64_t* Tensor::as<std::int64_t>() const;
template const float* Tensor::as<float>() const;

} // namespace detrt
