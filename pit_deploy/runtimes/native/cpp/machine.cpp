#include "machine.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

using nlohmann::json;

namespace {

constexpr size_t kBandwidthBytes = 256u << 20;
constexpr int kPasses = 6;

// A descriptor that is closed with it.
class File {
 public:
  explicit File(const std::string& path) : descriptor(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~File() {
    if (descriptor >= 0) close(descriptor);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const int descriptor;
};

json kilobytes(const std::string& line) {
  std::istringstream words(line.substr(line.find(':') + 1));
  int64_t value = 0;
  return words >> value ? json(value * 1024) : json();
}

}  // namespace

json process_memory() {
  json found = {{"resident", nullptr}, {"private", nullptr}, {"peak", nullptr}};
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) found["resident"] = kilobytes(line);
    if (line.rfind("RssAnon:", 0) == 0) found["private"] = kilobytes(line);
    if (line.rfind("VmHWM:", 0) == 0) found["peak"] = kilobytes(line);
  }
  return found;
}

std::optional<double> busy_seconds() {
  std::ifstream stat("/proc/stat");
  std::string name;
  if (!(stat >> name) || name != "cpu") return std::nullopt;
  double total = 0;
  for (int column = 0; column < 8; ++column) {
    double ticks = 0;
    if (!(stat >> ticks)) return std::nullopt;
    if (column != 3 && column != 4) total += ticks;  // idle, waiting for disks
  }
  return total / static_cast<double>(sysconf(_SC_CLK_TCK));
}

double own_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

double read_bandwidth(int threads) {
  static const std::vector<uint64_t> array(kBandwidthBytes / sizeof(uint64_t), 1);
  const size_t part = array.size() / static_cast<size_t>(threads);
  double fastest = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    std::vector<uint64_t> results(static_cast<size_t>(threads));
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> readers;
    for (int n = 0; n < threads; ++n) {
      readers.emplace_back([&, n] {
        uint64_t found = 0;
        const uint64_t* first = array.data() + part * static_cast<size_t>(n);
        for (size_t i = 0; i < part; ++i) found |= first[i];
        results[static_cast<size_t>(n)] = found;
      });
    }
    for (auto& reader : readers) reader.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const volatile uint64_t kept = results[0];  // the reading is not optimised away
    (void)kept;
    fastest = std::max(fastest, static_cast<double>(part * sizeof(uint64_t)) * threads / seconds.count());
  }
  return fastest;
}

bool drop_pages(const std::vector<std::string>& paths) {
  bool dropped = true;
  for (const auto& path : paths) {
    const File file(path);
    if (file.descriptor < 0) return false;
    fsync(file.descriptor);
    dropped &= posix_fadvise(file.descriptor, 0, 0, POSIX_FADV_DONTNEED) == 0;
  }
  return dropped;
}

void read_pages(const std::vector<std::string>& paths) {
  std::vector<char> piece(4 << 20);
  for (const auto& path : paths) {
    const File file(path);
    while (read(file.descriptor, piece.data(), piece.size()) > 0) {
    }
  }
}

std::optional<double> resident_share(const std::vector<std::string>& paths) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t pages = 0, resident = 0;
  for (const auto& path : paths) {
    const File file(path);
    struct stat info;
    if (file.descriptor < 0 || fstat(file.descriptor, &info) != 0) return std::nullopt;
    const auto size = static_cast<size_t>(info.st_size);
    if (size == 0) continue;
    void* mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor, 0);
    if (mapped == MAP_FAILED) return std::nullopt;
    std::vector<unsigned char> found((size + page - 1) / page);
    const int status = mincore(mapped, size, found.data());
    munmap(mapped, size);
    if (status != 0) return std::nullopt;
    pages += found.size();
    for (unsigned char bit : found) resident += bit & 1;
  }
  if (pages == 0) return std::nullopt;
  return static_cast<double>(resident) / static_cast<double>(pages);
}

json machine() {
  utsname name;
  uname(&name);
  json found = {{"system", std::string(name.sysname) + " " + name.release},
                {"architecture", name.machine},
                {"cores", nullptr},
                {"memory_bytes", nullptr},
                {"load_average", nullptr}};
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) found["cores"] = CPU_COUNT(&cores);
  const long count = sysconf(_SC_PHYS_PAGES);
  if (count > 0) found["memory_bytes"] = static_cast<int64_t>(count) * sysconf(_SC_PAGESIZE);
  std::ifstream load("/proc/loadavg");
  double average = 0;
  if (load >> average) found["load_average"] = average;
  return found;
}
