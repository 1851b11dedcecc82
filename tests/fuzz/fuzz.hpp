// What the fuzz targets share: reading choices off the bytes, and ending the process with a reason.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>

namespace tilewise::fuzz {

// Ends the process unless it holds, and says what was found; libFuzzer keeps the input.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
    if (holds) return;
    std::ostringstream what;
    (what << ... << parts);
    std::fprintf(stderr, "FOUND: %s\n", what.str().c_str());
    std::abort();
}

// Choices, one byte each as long as that is enough, so that a changed byte changes one choice. Past the end all are 0,
// which is always the plain one.
class Bytes {
public:
    Bytes(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

    uint8_t byte() { return at_ < end_ ? *at_++ : uint8_t{0}; }
    int64_t below(int64_t n) { return byte() % n; }
    bool one_in(int n) { return byte() % n == n - 1; }
    int64_t word() {
        uint64_t bits = 0;
        for (int n = 0; n < 8; ++n) bits = bits << 8 | byte();
        return static_cast<int64_t>(bits);
    }
    // Small, or at an end of what its type holds: where arithmetic overflows.
    int64_t number() {
        switch (below(8)) {
            case 5: return INT64_MAX - below(3);
            case 6: return INT64_MIN + below(3);
            case 7: return word();
            default: return static_cast<int8_t>(byte());
        }
    }
    double real() {
        switch (below(8)) {
            case 6: return 1e300;
            case 7: {
                const int64_t bits = word();  // NaN, infinities and subnormal numbers among them
                double value;
                std::memcpy(&value, &bits, sizeof value);
                return value;
            }
            default: return static_cast<double>(static_cast<int8_t>(byte())) / 32;
        }
    }
    std::string text() {  // its length, then the bytes
        const size_t wanted = byte(), left = static_cast<size_t>(end_ - at_), n = wanted < left ? wanted : left;
        const std::string out(reinterpret_cast<const char*>(at_), n);
        at_ += n;
        return out;
    }
    std::string rest() { return {reinterpret_cast<const char*>(at_), static_cast<size_t>(end_ - at_)}; }

private:
    const uint8_t *at_, *end_;
};

}  // namespace tilewise::fuzz
