// Compiled kernels on disk. Content-addressed: a file's name is the hash of everything that decides its bytes, so an
// entry is never stale, only unused. A damaged, foreign or half-written file is a miss, never an error; without a
// usable disk everything works, only slower.
//
// Many processes may start at once: one of them compiles a kernel, the others wait for it (flock, given up by the
// system when its holder dies) and read what it published (rename, so that no reader sees half a file).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "image.hpp"

namespace tilewise::jit {

struct CacheEntry {
    std::string key;
    std::string about;
    uint64_t bytes = 0;
    int64_t last_use = 0;  // seconds since 1970
    std::string problem;   // why it would be a miss; "" if it is sound
};

class Cache {
public:
    enum class Trust {
        own,   // files of this user that nobody else may write
        pack,  // files of this user or root that not everybody may write; never written to
    };

    // An empty directory or max_bytes = 0: no cache, every find is a miss. The directory is made when first written to.
    Cache(std::string directory, uint64_t max_bytes, Trust trust = Trust::own);

    // What is stored under the hash of this text, or what `compile` gives; that is then published.
    [[nodiscard]] Image get_or_compile(const std::string& key_material, const std::function<Image()>& compile) const;

    [[nodiscard]] std::optional<Image> find(const std::string& key_material) const;
    // False if the disk does not take it.
    bool publish(const std::string& key_material, const Image& image) const;  // NOLINT(modernize-use-nodiscard)

    [[nodiscard]] std::vector<CacheEntry> ls() const;      // reads headers only
    [[nodiscard]] std::vector<CacheEntry> verify() const;  // reads and checks everything
    uint64_t clear() const;                                // NOLINT(modernize-use-nodiscard): number of entries removed

    [[nodiscard]] const std::string& directory() const { return directory_; }
    [[nodiscard]] uint64_t max_bytes() const { return max_bytes_; }
    [[nodiscard]] static std::string file_name(const std::string& key_material);

private:
    [[nodiscard]] bool enabled() const { return !directory_.empty() && max_bytes_ > 0; }
    [[nodiscard]] std::vector<CacheEntry> scan(bool everything) const;
    void evict() const;

    std::string directory_;
    uint64_t max_bytes_;
    Trust trust_;
};

// As TILEWISE_CACHE_DIR and TILEWISE_CACHE_MAX_MB say; default: $XDG_CACHE_HOME/tilewise or ~/.cache/tilewise, 1 GiB.
Cache user_cache();
// The folders of TILEWISE_PACKS.
std::vector<Cache> packs();

}  // namespace tilewise::jit
