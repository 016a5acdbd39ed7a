#include "manifest.h"

#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "sha256.h"

using nlohmann::json;

namespace {

constexpr int64_t kFormatVersion = 1;
constexpr uint64_t kBiggestManifest = 16 << 20;

std::string read_text(const std::string& path) {
  struct stat found;
  if (stat(path.c_str(), &found) != 0) throw BundleError("not_a_bundle", path + " is missing");
  if (static_cast<uint64_t>(found.st_size) > kBiggestManifest) {
    throw BundleError("wrong_size", path + " has " + std::to_string(found.st_size) + " bytes, which no manifest has");
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) throw BundleError("unreadable_file", path + " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// The field of an object, with the type of T; a fault names the field.
template <typename T>
T field(const json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) throw BundleError("missing_field", std::string("the field '") + name + "' is missing");
  try {
    return found->get<T>();
  } catch (const json::exception&) {
    throw BundleError("bad_value", std::string("the field '") + name + "' is " + found->dump().substr(0, 60));
  }
}

// A path of the bundle has `/` between its parts, none of which is empty, `.` or `..`.
void check_path(const std::string& path) {
  bool good = !path.empty() && path.find_first_of("\\:") == std::string::npos;
  for (size_t start = 0; good && start <= path.size();) {
    const size_t end = std::min(path.find('/', start), path.size());
    const std::string part = path.substr(start, end - start);
    good = !part.empty() && part != "." && part != "..";
    start = end + 1;
  }
  if (!good) throw BundleError("path_escape", "the path '" + path + "' could lead out of the bundle");
}

State state_of(const json& object) {
  State state{field<std::string>(object, "name"), field<std::string>(object, "output"), 0, 0};
  const auto shape = field<json>(object, "shape");
  if (field<std::string>(object, "dtype") != "float32" || !shape.is_array() || shape.size() != 4 ||
      !shape[1].is_number_integer() || !shape[3].is_number_integer()) {
    throw BundleError("bad_value", "the state '" + state.input + "' is not float32 [1, heads, tokens, head_dim]");
  }
  state.heads = shape[1].get<int64_t>();
  state.head_dim = shape[3].get<int64_t>();
  return state;
}

Manifest manifest_of(const json& object) {
  if (!object.is_object() || object.value("format", json()) != "pit-deploy bundle") {
    throw BundleError("not_a_bundle", "it is not the manifest of a pit-deploy bundle");
  }
  const auto version = field<int64_t>(object, "format_version");
  if (version != kFormatVersion) {
    throw BundleError(version > kFormatVersion ? "newer_version" : "older_version",
                      "it has format version " + std::to_string(version) + ", and this runner reads version " +
                          std::to_string(kFormatVersion));
  }
  const auto runtime = field<std::string>(object, "runtime");
  if (runtime != "onnx") throw BundleError("bad_value", "it is for " + runtime + ", and this runner opens onnx bundles");
  Manifest manifest;
  manifest.model_file = field<std::string>(object, "model_file");
  manifest.profile = field<std::string>(object, "profile");
  manifest.last_only = field<std::string>(object, "logits") == "last";
  manifest.vocab_size = field<int64_t>(object, "vocab_size");
  manifest.context_length = field<int64_t>(object, "context_length");
  for (const auto& state : field<json>(object, "states")) manifest.states.push_back(state_of(state));
  for (const auto& entry : field<json>(object, "files")) {
    manifest.files.push_back(
        {field<std::string>(entry, "path"), field<uint64_t>(entry, "size"), field<std::string>(entry, "sha256")});
    check_path(manifest.files.back().path);
  }
  bool listed = false;
  for (const auto& entry : manifest.files) listed |= entry.path == manifest.model_file;
  if (!listed) throw BundleError("unlisted_file", "its model_file '" + manifest.model_file + "' is not among its files");
  if (manifest.profile != "default" && manifest.profile != "standard") {
    throw BundleError("bad_value", "its profile '" + manifest.profile + "' is not known");
  }
  if (manifest.vocab_size < 1 || manifest.context_length < 1) {
    throw BundleError("bad_value", "its vocab_size or context_length is below 1");
  }
  return manifest;
}

}  // namespace

Manifest read_manifest(const std::string& directory) {
  const std::string path = directory + "/manifest.json";
  const std::string text = read_text(path);
  try {
    return manifest_of(json::parse(text));
  } catch (const json::exception&) {
    throw BundleError("bad_json", path + " is not valid JSON");
  } catch (const BundleError& error) {
    throw BundleError(error.kind, path + ": " + error.what());
  }
}

void check_files(const std::string& directory, const Manifest& manifest, bool hashes) {
  for (const auto& entry : manifest.files) {
    const std::string path = directory + "/" + entry.path;
    struct stat found;
    if (stat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) {
      throw BundleError("missing_file", path + " is missing, and the manifest lists it");
    }
    if (static_cast<uint64_t>(found.st_size) != entry.size) {
      throw BundleError("wrong_size", path + " has " + std::to_string(found.st_size) + " bytes, and the manifest says " +
                                          std::to_string(entry.size));
    }
    if (hashes && sha256_of_file(path) != entry.sha256) {
      throw BundleError("wrong_hash", path + " has changed: its SHA-256 is not the manifest's");
    }
  }
}
