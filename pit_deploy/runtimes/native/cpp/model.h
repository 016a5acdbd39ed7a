// One model in ONNX Runtime with one sequence in its cache.
#pragma once

#include <onnxruntime_cxx_api.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "manifest.h"

// An array as it goes back to the host: [rows, columns], float32.
struct Rows {
  int64_t rows;
  int64_t columns;
  std::vector<float> values;
};

class Model {
 public:
  // Open the model of a bundle on the CPU. `threads` 0 leaves their number to ONNX Runtime; `config` has session
  // entries by name. Throws Ort::Exception where ONNX Runtime refuses it.
  Model(std::string directory, const Manifest& manifest, int threads, const std::map<std::string, std::string>& config);

  int64_t position() const { return position_; }

  // Append ids (at least one, all in the vocabulary) in one pass; the logits of the last position, vocab_size long,
  // valid until the next call. Throws std::length_error where they do not fit into the context.
  const float* append(const std::vector<int64_t>& ids);

  void reset();

  // From an empty cache that is not this one's: the values called `outputs` of the graph in the file `graph` (beside
  // the bundle's files where it is relative), whose weights lie in the bundle, each [tokens, columns].
  std::vector<Rows> probe(const std::string& graph, const std::vector<std::string>& outputs,
                          const std::vector<int64_t>& ids);

 private:
  Ort::SessionOptions options(bool in_memory) const;
  void bind_buffers();
  void run_shared(std::vector<int64_t>& ids);
  void run_growing(std::vector<int64_t>& ids);
  void check(const std::vector<int64_t>& ids) const;

  std::string directory_;
  Manifest manifest_;
  int threads_;
  std::map<std::string, std::string> config_;
  Ort::Env environment_;
  Ort::MemoryInfo memory_;
  std::unique_ptr<Ort::Session> session_;
  std::unique_ptr<Ort::IoBinding> binding_;
  std::vector<std::vector<float>> buffers_;  // past and present at once, [1, heads, context_length, head_dim]
  std::vector<Ort::Value> grown_;            // of the profile `standard`: the states as the last run gave them
  std::vector<int64_t> mask_;
  std::vector<float> logits_;
  int64_t position_ = 0;
  std::unique_ptr<Ort::Session> probe_;
  std::string probed_;
};
