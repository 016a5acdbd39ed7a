// pit-runner: holds one bundle in ONNX Runtime and answers requests.
//
//   pit-runner BUNDLE < requests > answers
//
// A request is one line of JSON with the key "do". An answer is one line of JSON, followed by the bytes of the arrays
// that its key "arrays" describes as {name: [type, shape]}, one after the other. It has "ok" true, or "ok" false with
// "error" and "kind". What is timed is timed in here. docs/devices.md lists the requests.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>

#include "machine.h"
#include "manifest.h"
#include "model.h"

using nlohmann::json;

namespace {

constexpr char kVersion[] = "1";
constexpr size_t kWakeTokens = 4;

using Ids = std::vector<int64_t>;

Ids first(const Ids& ids, size_t count) { return {ids.begin(), ids.begin() + std::min(count, ids.size())}; }

json or_null(const std::optional<double>& value) { return value ? json(*value) : json(); }

class Runner {
 public:
  explicit Runner(std::string directory) : directory_(std::move(directory)) {}

  // The answer to a request; `arrays` gets what follows it.
  json answer(const json& request, std::vector<std::pair<std::string, Rows>>& arrays) {
    const auto what = request.at("do").get<std::string>();
    if (what == "hello") return {{"runner", kVersion}, {"onnxruntime", Ort::GetVersionString()}, {"machine", machine()}};
    if (what == "check") return check(request.value("hashes", false));
    if (what == "open") return open(request);
    if (what == "drop") return {{"dropped", drop_pages(model_files())}};
    if (what == "read") return read();
    if (what == "share") return {{"share", or_null(resident_share(model_files()))}};
    if (what == "memory") return process_memory();
    if (what == "bandwidth") return {{"bytes_per_second", read_bandwidth(request.at("threads").get<int>())}};
    if (what == "append") return append(request, arrays);
    if (what == "reset") return reset();
    if (what == "probe") return probe(request, arrays);
    if (what == "wake") return wake(ids_of(request));
    if (what == "first") return timed([&] { greedy(ids_of(request)); });
    if (what == "prefill") return prefill(ids_of(request));
    if (what == "decode") return decode(request.at("context").get<Ids>(), ids_of(request));
    throw std::invalid_argument("the request '" + what + "' is not known to version " + kVersion + " of the runner");
  }

 private:
  json check(bool hashes) {
    const Manifest manifest = read_manifest(directory_);
    check_files(directory_, manifest, hashes);
    return {{"files", manifest.files.size()}};
  }

  json open(const json& request) {
    manifest_ = read_manifest(directory_);
    check_files(directory_, manifest_, false);
    const json before = process_memory();
    const auto start = std::chrono::steady_clock::now();
    model_ = std::make_unique<Model>(directory_, manifest_, request.value("threads", 0),
                                     request.value("config", std::map<std::string, std::string>()));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    return {{"seconds", seconds.count()}, {"before", before}, {"after", process_memory()}};
  }

  json read() {
    read_pages(model_files());
    return json::object();
  }

  json append(const json& request, std::vector<std::pair<std::string, Rows>>& arrays) {
    const float* logits = model().append(ids_of(request));
    arrays.push_back({"logits", {1, manifest_.vocab_size, {logits, logits + manifest_.vocab_size}}});
    return {{"position", model().position()}};
  }

  json reset() {
    model().reset();
    return json::object();
  }

  json probe(const json& request, std::vector<std::pair<std::string, Rows>>& arrays) {
    const auto outputs = request.at("outputs").get<std::vector<std::string>>();
    auto found = model().probe(request.at("graph").get<std::string>(), outputs, ids_of(request));
    for (size_t i = 0; i < found.size(); ++i) arrays.push_back({outputs[i], std::move(found[i])});
    return json::object();
  }

  // A little, untimed: threads wake up, caches hold what they will.
  json wake(const Ids& ids) {
    model().reset();
    greedy(first(ids, 2 * kWakeTokens));
    model().reset();
    steps(first(ids, kWakeTokens));
    return json::object();
  }

  json prefill(const Ids& ids) {
    wake(ids);
    model().reset();
    return timed([&] { greedy(ids); });
  }

  json decode(const Ids& context, const Ids& ids) {
    wake(ids);
    model().reset();
    if (!context.empty()) greedy(context);
    return timed([&] { steps(ids); });
  }

  // Append ids in one pass and choose the greedy token after them.
  void greedy(const Ids& ids) {
    const float* logits = model().append(ids);
    chosen_ = std::max_element(logits, logits + manifest_.vocab_size) - logits;
  }

  void steps(const Ids& ids) {
    for (int64_t id : ids) greedy({id});
  }

  // Seconds of a call, and the processor seconds that other processes took meanwhile.
  json timed(const std::function<void()>& call) {
    const auto busy = busy_seconds();
    const double own = own_seconds();
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const double own_after = own_seconds() - own;
    const auto after = busy_seconds();
    json found = {{"seconds", seconds.count()}, {"others", nullptr}, {"token", chosen_}};
    if (busy && after) found["others"] = std::max(*after - *busy - own_after, 0.0);
    return found;
  }

  Model& model() {
    if (!model_) throw std::invalid_argument("no model is open");
    return *model_;
  }

  static Ids ids_of(const json& request) { return request.at("ids").get<Ids>(); }

  // The graph and its weights, whose name starts with the graph's.
  std::vector<std::string> model_files() const {
    const Manifest manifest = read_manifest(directory_);
    std::vector<std::string> paths;
    for (const auto& entry : manifest.files) {
      if (entry.path.rfind(manifest.model_file, 0) == 0) paths.push_back(directory_ + "/" + entry.path);
    }
    return paths;
  }

  std::string directory_;
  Manifest manifest_;
  std::unique_ptr<Model> model_;
  int64_t chosen_ = -1;
};

json failure(const std::string& kind, const std::string& message) {
  return {{"ok", false}, {"kind", kind}, {"error", message}};
}

json answer_safely(Runner& runner, const std::string& line, std::vector<std::pair<std::string, Rows>>& arrays) {
  try {
    json answer = runner.answer(json::parse(line), arrays);
    answer["ok"] = true;
    return answer;
  } catch (const BundleError& error) {
    return failure(error.kind, error.what());
  } catch (const Ort::Exception& error) {
    return failure("onnxruntime", error.what());
  } catch (const std::length_error& error) {
    return failure("context_full", error.what());
  } catch (const std::exception& error) {
    return failure("bad_request", error.what());
  }
}

void write_all(int descriptor, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t written = write(descriptor, data, size);
    if (written <= 0) std::exit(1);  // nobody listens any more
    data += written;
    size -= static_cast<size_t>(written);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::string(arguments[1]) == "--version") {
    std::printf("pit-runner %s, ONNX Runtime %s\n", kVersion, Ort::GetVersionString().c_str());
    return 0;
  }
  if (count != 2) {
    std::fprintf(stderr, "usage: pit-runner BUNDLE < requests > answers\n");
    return 2;
  }
  // Answers have a stream of their own: whatever a library prints goes to standard error.
  const int answers = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  Runner runner(arguments[1]);
  for (std::string line; std::getline(std::cin, line);) {
    if (line.empty()) continue;
    std::vector<std::pair<std::string, Rows>> arrays;
    json answer = answer_safely(runner, line, arrays);
    if (!answer["ok"]) arrays.clear();
    answer["arrays"] = json::object();
    // The keys of a JSON object are sorted; so are the arrays.
    std::sort(arrays.begin(), arrays.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [name, rows] : arrays) answer["arrays"][name] = {"<f4", {rows.rows, rows.columns}};
    const std::string text = answer.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
    write_all(answers, text.data(), text.size());
    for (const auto& [name, rows] : arrays) {
      write_all(answers, reinterpret_cast<const char*>(rows.values.data()), rows.values.size() * sizeof(float));
    }
  }
  return 0;
}
