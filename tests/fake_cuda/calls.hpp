// What both libraries do at the start of every call: count it, and fail if the environment says so.
//   TILEWISE_FAKE_FAIL=cuLaunchKernelEx:719,cuMemAlloc:2@3   every launch fails; the third allocation fails
//   TILEWISE_FAKE_TRACE=1                                    names of the calls on stderr
// A name without its suffix (_v2) means all its versions. Counting starts anew when TILEWISE_FAKE_FAIL changes.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace tw_fake {

class Calls {
public:
    // The code to fail with, or 0.
    int enter(const char* function) {
        std::string_view name = function;
        for (const std::string_view suffix : {"_v2", "_v3"}) {
            if (name.size() > 3 && name.substr(name.size() - 3) == suffix) name.remove_suffix(3);
        }
        const char* fail = std::getenv("TILEWISE_FAKE_FAIL");
        if (std::getenv("TILEWISE_FAKE_TRACE")) std::fprintf(stderr, "fake CUDA: %s\n", function);
        const std::lock_guard lock(mutex_);
        ++counts_[std::string(name)];
        if (!fail) fail = "";
        if (spec_ != fail) {
            spec_ = fail;
            since_.clear();
        }
        if (spec_.empty()) return 0;
        const unsigned long n = ++since_[std::string(name)];
        for (std::string_view rest = spec_; !rest.empty();) {
            const size_t comma = rest.find(',');
            const std::string item(rest.substr(0, comma));
            rest.remove_prefix(comma == std::string_view::npos ? rest.size() : comma + 1);
            const size_t colon = item.find(':'), at = item.find('@');
            if (colon == std::string::npos) continue;
            const std::string_view wanted = std::string_view(item).substr(0, colon);
            if (wanted != name && wanted != function) continue;
            if (at == std::string::npos || std::strtoul(item.c_str() + at + 1, nullptr, 10) == n) {
                return static_cast<int>(std::strtol(item.c_str() + colon + 1, nullptr, 10));
            }
        }
        return 0;
    }
    unsigned long long count(const char* name) {
        const std::lock_guard lock(mutex_);
        return counts_[name];
    }

private:
    std::mutex mutex_;
    std::string spec_;
    std::map<std::string, unsigned long long> counts_, since_;
};

inline Calls& calls() {
    static auto* one = new Calls;  // calls may come after static objects are gone
    return *one;
}

}  // namespace tw_fake
