// Errors are values with context: which argument, what was seen, what is allowed, what to do.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilewise::core {

// Numbers are those of tilewise_status in tilewise.h.
enum class Status : int32_t {
    ok = 0,
    invalid_argument = 1,  // a bad value: shape, dtype, range, text
    unsupported = 2,       // valid, but no implementation on this machine takes it
    out_of_memory = 3,
    version_mismatch = 4,  // struct size or ABI version
    internal = 5,
};

class Error : public std::runtime_error {
public:
    Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
    [[nodiscard]] Status status() const { return status_; }

private:
    Status status_;
};

// "argument: got SEEN; allowed: ALLOWED. ADVICE" -- the four parts every refusal has.
[[noreturn]] inline void refuse(const std::string& argument, const std::string& seen, const std::string& allowed,
                                const std::string& advice = "") {
    std::string text = argument + ": got " + seen + "; allowed: " + allowed + ".";
    if (!advice.empty()) text += " " + advice;
    throw Error(Status::invalid_argument, text);
}

}  // namespace tilewise::core
