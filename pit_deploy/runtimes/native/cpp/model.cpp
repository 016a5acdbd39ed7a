#include "model.h"

#include <array>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace {

constexpr char kExternalFolder[] = "session.model_external_initializers_file_folder_path";

template <typename T>
Ort::Value tensor(const Ort::MemoryInfo& memory, T* data, const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (int64_t size : shape) count *= static_cast<size_t>(size);
  return Ort::Value::CreateTensor<T>(memory, data, count, shape.data(), shape.size());
}

}  // namespace

Model::Model(std::string directory, const Manifest& manifest, int threads,
             const std::map<std::string, std::string>& config)
    : directory_(std::move(directory)),
      manifest_(manifest),
      threads_(threads),
      config_(config),
      environment_(ORT_LOGGING_LEVEL_FATAL, "pit-runner"),
      memory_(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault)),
      mask_(static_cast<size_t>(manifest.context_length), 1) {
  const std::string path = directory_ + "/" + manifest_.model_file;
  session_ = std::make_unique<Ort::Session>(environment_, path.c_str(), options(false));
  if (manifest_.profile == "default") bind_buffers();
  reset();
}

Ort::SessionOptions Model::options(bool in_memory) const {
  Ort::SessionOptions options;
  options.SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);
  if (threads_ > 0) options.SetIntraOpNumThreads(threads_);
  for (const auto& [name, value] : config_) options.AddConfigEntry(name.c_str(), value.c_str());
  if (in_memory) options.AddConfigEntry(kExternalFolder, directory_.c_str());
  return options;
}

void Model::bind_buffers() {
  binding_ = std::make_unique<Ort::IoBinding>(*session_);
  for (const State& state : manifest_.states) {
    buffers_.emplace_back(static_cast<size_t>(state.heads * manifest_.context_length * state.head_dim), 0.0f);
    const Ort::Value value = tensor(memory_, buffers_.back().data(),
                                    {1, state.heads, manifest_.context_length, state.head_dim});
    binding_->BindInput(state.input.c_str(), value);
    binding_->BindOutput(state.output.c_str(), value);
  }
}

const float* Model::append(const std::vector<int64_t>& given) {
  check(given);
  std::vector<int64_t> ids = given;
  if (binding_) {
    run_shared(ids);
  } else {
    run_growing(ids);
  }
  position_ += static_cast<int64_t>(ids.size());
  return logits_.data() + (logits_.size() - static_cast<size_t>(manifest_.vocab_size));
}

void Model::reset() {
  // What lies past the mask is never read, so that the shared buffers stay as they are.
  position_ = 0;
  grown_.clear();
  if (binding_) return;
  for (const State& state : manifest_.states) {
    grown_.push_back(tensor<float>(memory_, nullptr, {1, state.heads, 0, state.head_dim}));
  }
}

void Model::run_shared(std::vector<int64_t>& ids) {
  const auto tokens = static_cast<int64_t>(ids.size());
  const int64_t rows = manifest_.last_only ? 1 : tokens;
  logits_.resize(static_cast<size_t>(rows * manifest_.vocab_size));
  const Ort::Value input = tensor(memory_, ids.data(), {1, tokens});
  const Ort::Value mask = tensor(memory_, mask_.data(), {1, position_ + tokens});
  const Ort::Value logits = tensor(memory_, logits_.data(), {1, rows, manifest_.vocab_size});
  binding_->BindInput("input_ids", input);
  binding_->BindInput("attention_mask", mask);
  binding_->BindOutput("logits", logits);
  session_->Run(Ort::RunOptions{nullptr}, *binding_);
}

void Model::run_growing(std::vector<int64_t>& ids) {
  const auto tokens = static_cast<int64_t>(ids.size());
  std::vector<const char*> inputs = {"input_ids", "attention_mask"}, outputs = {"logits"};
  std::vector<Ort::Value> values;
  values.push_back(tensor(memory_, ids.data(), {1, tokens}));
  values.push_back(tensor(memory_, mask_.data(), {1, position_ + tokens}));
  for (size_t i = 0; i < manifest_.states.size(); ++i) {
    inputs.push_back(manifest_.states[i].input.c_str());
    outputs.push_back(manifest_.states[i].output.c_str());
    values.push_back(std::move(grown_[i]));
  }
  auto found = session_->Run(Ort::RunOptions{nullptr}, inputs.data(), values.data(), values.size(), outputs.data(),
                             outputs.size());
  const float* logits = found[0].GetTensorData<float>();
  logits_.assign(logits, logits + found[0].GetTensorTypeAndShapeInfo().GetElementCount());
  grown_.clear();
  for (size_t i = 1; i < found.size(); ++i) grown_.push_back(std::move(found[i]));
}

std::vector<Rows> Model::probe(const std::string& graph, const std::vector<std::string>& outputs,
                               const std::vector<int64_t>& given) {
  if (!probe_ || probed_ != graph) {
    const std::string path = graph.rfind('/', 0) == 0 ? graph : directory_ + "/" + graph;
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path + " cannot be read");
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    probe_ = std::make_unique<Ort::Session>(environment_, bytes.data(), bytes.size(), options(true));
    probed_ = graph;
  }
  std::vector<int64_t> ids = given, mask(given.size(), 1);
  const auto tokens = static_cast<int64_t>(ids.size());
  std::vector<const char*> inputs = {"input_ids", "attention_mask"}, names;
  std::vector<Ort::Value> values;
  values.push_back(tensor(memory_, ids.data(), {1, tokens}));
  values.push_back(tensor(memory_, mask.data(), {1, tokens}));
  for (const State& state : manifest_.states) {
    inputs.push_back(state.input.c_str());
    values.push_back(tensor<float>(memory_, nullptr, {1, state.heads, 0, state.head_dim}));
  }
  for (const std::string& name : outputs) names.push_back(name.c_str());
  auto found =
      probe_->Run(Ort::RunOptions{nullptr}, inputs.data(), values.data(), values.size(), names.data(), names.size());
  std::vector<Rows> rows;
  for (const Ort::Value& value : found) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const auto shape = info.GetShape();
    const float* data = value.GetTensorData<float>();
    rows.push_back({shape[shape.size() - 2], shape.back(), {data, data + info.GetElementCount()}});
  }
  return rows;
}

void Model::check(const std::vector<int64_t>& ids) const {
  if (ids.empty()) throw std::invalid_argument("there are no ids to run");
  for (int64_t id : ids) {
    if (id < 0 || id >= manifest_.vocab_size) {
      throw std::invalid_argument("the id " + std::to_string(id) + " is outside the vocabulary of " +
                                  std::to_string(manifest_.vocab_size) + " rows");
    }
  }
  if (position_ + static_cast<int64_t>(ids.size()) > manifest_.context_length) {
    throw std::length_error("the context is full: " + std::to_string(position_) + " tokens are in the cache, " +
                            std::to_string(ids.size()) + " more were asked for, and the artifact holds " +
                            std::to_string(manifest_.context_length));
  }
}
