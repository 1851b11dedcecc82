// The "cubin" of the fake GPU: this header, then a shared object. Its "PTX" is the same in hexadecimal digits.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "abi.hpp"

namespace tw_fake {

constexpr char kMagic[16] = "TilewiseFakeGPU";
constexpr std::string_view kPtxMagic = "//\n// TilewiseFakePTX\n//\n";

struct ImageHeader {
    char magic[16];
    uint32_t abi, arch;  // 90
    uint32_t suffix;     // of the arch: 0, 'a' or 'f'
    uint32_t ptx;
    uint64_t size, checksum;  // of what follows
};

inline uint64_t checksum_of(std::string_view bytes) {
    uint64_t h = 0xCBF29CE484222325ull;
    for (const char c : bytes) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ull;
    return h;
}

inline std::string make_image(std::string_view object, unsigned arch, char suffix, bool ptx) {
    ImageHeader header = {};
    std::memcpy(header.magic, kMagic, sizeof kMagic);
    header.abi = kAbi;
    header.arch = arch;
    header.suffix = static_cast<unsigned char>(suffix);
    header.ptx = ptx;
    header.size = object.size();
    header.checksum = checksum_of(object);
    std::string image(reinterpret_cast<const char*>(&header), sizeof header);
    image += object;
    if (!ptx) return image;
    std::string text(kPtxMagic);
    for (const char c : image) {
        constexpr char digits[] = "0123456789abcdef";
        text += digits[static_cast<unsigned char>(c) >> 4];
        text += digits[c & 15];
    }
    return text += '\n';
}

}  // namespace tw_fake
