// SHA-256 (FIPS 180-4) of a file, read in pieces.
#pragma once

#include <string>

// 64 lower-case hexadecimal digits; throws std::runtime_error where the file cannot be read.
std::string sha256_of_file(const std::string& path);
