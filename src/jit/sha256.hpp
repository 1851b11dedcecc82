// SHA-256 (FIPS 180-4): names what the cache holds and notices when it is damaged.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace tilewise::jit {

using Digest = std::array<uint8_t, 32>;

Digest sha256(std::string_view bytes);
std::string hex(const Digest& digest);

}  // namespace tilewise::jit
