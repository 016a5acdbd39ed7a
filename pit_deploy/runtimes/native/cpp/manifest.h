// What the runner needs of manifest.json, and the checks that come before a runtime opens anything.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

struct FileEntry {
  std::string path;
  uint64_t size;
  std::string sha256;
};

// A state of the graph: input, output and the sizes of [1, heads, tokens, head_dim].
struct State {
  std::string input;
  std::string output;
  int64_t heads;
  int64_t head_dim;
};

struct Manifest {
  std::string model_file;
  std::string profile;
  bool last_only;  // logits of the last position alone
  int64_t vocab_size;
  int64_t context_length;
  std::vector<State> states;
  std::vector<FileEntry> files;
};

// A bundle that is not what it says; `kind` is one of the kinds of docs/bundle.md.
class BundleError : public std::runtime_error {
 public:
  BundleError(std::string kind, const std::string& message) : std::runtime_error(message), kind(std::move(kind)) {}
  std::string kind;
};

// Read `directory`/manifest.json and check its fields and paths. Throws BundleError.
Manifest read_manifest(const std::string& directory);

// Check that every file is there and has its size, and with `hashes` its SHA-256. Throws BundleError.
void check_files(const std::string& directory, const Manifest& manifest, bool hashes);
