// A prompt encoded by `detrt encode-prompt` (Python): token ids, masks and text features for one bundle.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "detrt/bundle.hpp"
#include "detrt/decode.hpp"
#include "detrt/session.hpp"

namespace detrt {

struct Phrase {
  std::string text;
  std::int64_t class_id = 0;
  std::int64_t start = 0, end = 0; // characters of the prompt
};

// A chunk: one run of the model. A list of names that is longer than the model takes has several.
struct PromptPart {
  std::vector<Phrase> phrases;
  std::int64_t length = 0;                          // tokens, or class names
  std::vector<std::vector<std::int64_t>> tokens_of; // of kind "tokens": which tokens belong to each phrase
  Tensors feeds;                                    // the text inputs of the detector, for one image
};

class Prompt {
public:
  // Throws Error (prompt): a file that is missing, damaged, or encoded for another bundle.
  static Prompt open(const std::filesystem::path& path, const Bundle& bundle);
  static Prompt parse(const std::string& json, const std::string& name, const Bundle& bundle);

  const std::string& text() const noexcept { return text_; }
  bool listed() const noexcept { return listed_; } // a list of names, whose detections have no spans
  const std::vector<PromptPart>& parts() const noexcept { return parts_; }
  // The spec of a detector of fixed classes: the phrases.
  const ModelSpec& spec() const noexcept { return spec_; }

  // Text inputs for a batch of images, padded to lengths that the session takes. Throws Error.
  Tensors feeds(std::size_t part, std::int64_t images, const Session& session) const;
  // Merges the outputs of the chunks into those of a model with spec(). Throws Error (session).
  Tensors merged(const std::vector<Tensors>& runs, std::int64_t images) const;
  // Adds phrases and their spans in the prompt to detections.
  void name(Detections& detections) const;

private:
  Tensors merged_raw(const std::vector<Tensors>& runs, std::int64_t images) const;
  Tensors merged_decoded(const std::vector<Tensors>& runs, std::int64_t images) const;
  void keep_one_a_place(Tensor& logits, const Tensor& boxes) const;

  std::string text_;
  bool listed_ = false;
  std::int64_t pad_id_ = 0;
  DecodeSpec model_;
  ModelSpec spec_;
  std::vector<PromptPart> parts_;
  std::map<std::int64_t, Phrase> by_class_;
};

} // namespace detrt
