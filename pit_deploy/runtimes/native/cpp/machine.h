// What the system tells of this process, its files and itself; null where it does not.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

// Resident bytes, the part of them that is not file pages, and the peak.
nlohmann::json process_memory();

// Processor seconds of all cores since the system started, without idle and waiting.
std::optional<double> busy_seconds();

// Processor seconds of this process.
double own_seconds();

// Bytes a second that `threads` threads together read from 256 MiB: the fastest of a few passes.
double read_bandwidth(int threads);

// Drop the pages of files from the file cache; false where the system cannot.
bool drop_pages(const std::vector<std::string>& paths);

// Read files, so that their pages are in the file cache.
void read_pages(const std::vector<std::string>& paths);

// Share of the pages of files in the file cache.
std::optional<double> resident_share(const std::vector<std::string>& paths);

// Kernel, architecture, cores, memory, load.
nlohmann::json machine();
