// A session over a function, as FakeSession in Python.
#pragma once

#include <functional>

#include "detrt/session.hpp"

class FakeSession : public detrt::Session {
public:
  using Function = std::function<detrt::Tensors(const detrt::Tensors&)>;
  FakeSession(std::vector<detrt::TensorInfo> inputs, Function function, std::optional<std::int64_t> most = {},
              std::int64_t step = 1)
      : inputs_(std::move(inputs)), function_(std::move(function)), most_(most), step_(step) {}

  const std::vector<detrt::TensorInfo>& inputs() const override { return inputs_; }
  const std::vector<detrt::TensorInfo>& outputs() const override { return outputs_; }
  std::string backend() const override { return "fake"; }
  std::optional<std::int64_t> max_batch() const override { return most_; }
  std::int64_t length_step() const override { return step_; }
  detrt::Tensors run(const detrt::Tensors& feeds) override {
    detrt::check_feeds(inputs_, feeds);
    return function_(feeds);
  }

private:
  std::vector<detrt::TensorInfo> inputs_, outputs_;
  Function function_;
  std::optional<std::int64_t> most_;
  std::int64_t step_;
};
