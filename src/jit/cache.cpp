#include "cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstring>
#include <ctime>
#include <memory>
#include <thread>

#include "core/env.hpp"
#include "core/error.hpp"
#include "folder.hpp"
#include "sha256.hpp"

namespace tilewise::jit {
namespace {

constexpr std::string_view kSuffix = ".twk";
constexpr std::string_view kLockSuffix = ".lock";
constexpr std::string_view kTemporary = ".tmp-";
constexpr auto kLockTimeout = std::chrono::minutes(2);  // then compile for oneself: nothing is worse than not to start
constexpr int64_t kLeftoverSeconds = 3600;              // after which a temporary or lock file belongs to nobody

class File {
public:
    File(const std::string& path, int flags, mode_t mode = 0) : fd_(open(path.c_str(), flags | O_CLOEXEC, mode)) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() { close(); }
    void reopen(const std::string& path, int flags) {
        close();
        fd_ = open(path.c_str(), flags | O_CLOEXEC);
    }
    explicit operator bool() const { return fd_ >= 0; }
    [[nodiscard]] int fd() const { return fd_; }
    bool close() {
        const int result = fd_ >= 0 ? ::close(fd_) : 0;
        fd_ = -1;
        return result == 0;
    }

private:
    int fd_;
};

bool write_all(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t n = write(fd, bytes.data(), bytes.size());
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
}

bool read_all(int fd, size_t size, std::string& bytes) {
    bytes.resize(size);
    size_t at = 0;
    while (at < size) {
        const ssize_t n = pread(fd, bytes.data() + at, size - at, static_cast<off_t>(at));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) break;
        at += static_cast<size_t>(n);
    }
    bytes.resize(at);
    return at == size;
}

// ---------------------------------------------------------------------------------------------------------------------
// The file: fixed part, about, log, bytes. Little-endian, as every machine that CUDA runs on.

struct Fixed {
    char magic[8];
    uint32_t is_ptx;
    uint32_t about_bytes;
    uint64_t log_bytes;
    uint64_t image_bytes;
    Digest key;
    Digest checksum;  // of everything else
};
static_assert(sizeof(Fixed) == 96);
constexpr char kMagic[8] = {'T', 'W', 'K', 'E', 'R', 'N', '0', '1'};
constexpr uint64_t kMaxFile = uint64_t{1} << 30;

Digest checksum(Fixed fixed, std::string_view rest) {
    fixed.checksum = {};
    std::string all(reinterpret_cast<const char*>(&fixed), sizeof fixed);
    all += rest;
    return sha256(all);
}

std::string pack(const Digest& key, const Image& image) {
    Fixed fixed{};
    std::memcpy(fixed.magic, kMagic, sizeof kMagic);
    fixed.is_ptx = image.is_ptx;
    fixed.about_bytes = static_cast<uint32_t>(image.about.size());
    fixed.log_bytes = image.log.size();
    fixed.image_bytes = image.bytes.size();
    fixed.key = key;
    const std::string rest = image.about + image.log + image.bytes;
    fixed.checksum = checksum(fixed, rest);
    return std::string(reinterpret_cast<const char*>(&fixed), sizeof fixed) + rest;
}

enum class Read {
    header,  // what ls shows
    check,   // everything
    use,     // everything, and it counts as a use
};

struct Opened {
    std::string problem;
    Image image;
    uint64_t bytes = 0;
};

// Everything is asked of the open file, so that nothing can be swapped between a check and its use.
Opened read_entry(const std::string& path, const std::string& key_hex, Cache::Trust trust, Read how) {
    Opened entry;
    const auto bad = [&](const char* why) -> Opened& {
        entry.problem = why;
        return entry;
    };
    // To look is no use of it; only an owner may leave the time alone.
    const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;
    File file(path, how == Read::use ? flags : flags | O_NOATIME);
    if (!file && errno == EPERM) file.reopen(path, flags);
    if (!file) return bad(errno == ENOENT ? "not there" : std::strerror(errno));  // NOLINT(concurrency-mt-unsafe)
    struct stat info{};
    if (fstat(file.fd(), &info) != 0 || !S_ISREG(info.st_mode)) return bad("not a regular file");
    entry.bytes = static_cast<uint64_t>(info.st_size);
    const bool own = info.st_uid == geteuid();
    if (trust == Cache::Trust::own) {
        if (!own) return bad("belongs to another user");
        if (info.st_mode & (S_IWGRP | S_IWOTH)) return bad("others may write to it");
    } else {
        if (!own && info.st_uid != 0) return bad("belongs to another user");
        if (info.st_mode & S_IWOTH) return bad("everybody may write to it");
    }
    if (entry.bytes < sizeof(Fixed) || entry.bytes > kMaxFile) return bad("of a size that no entry has");

    std::string bytes;
    if (!read_all(file.fd(), how == Read::header ? sizeof(Fixed) : entry.bytes, bytes)) return bad("cannot be read");
    Fixed fixed;
    std::memcpy(&fixed, bytes.data(), sizeof fixed);
    if (std::memcmp(fixed.magic, kMagic, sizeof kMagic) != 0) return bad("not an entry of this version");
    if (fixed.about_bytes > kMaxFile || fixed.log_bytes > kMaxFile || fixed.image_bytes > kMaxFile ||
        sizeof fixed + fixed.about_bytes + fixed.log_bytes + fixed.image_bytes != entry.bytes) {
        return bad("truncated, or longer than it says");
    }
    if (hex(fixed.key) != key_hex) return bad("stored under another name");
    if (how == Read::header) {
        entry.image.about.resize(fixed.about_bytes);
        const ssize_t n = pread(file.fd(), entry.image.about.data(), fixed.about_bytes, sizeof fixed);
        if (n != static_cast<ssize_t>(fixed.about_bytes)) return bad("cannot be read");
        return entry;
    }
    const std::string_view rest = std::string_view(bytes).substr(sizeof fixed);
    if (checksum(fixed, rest) != fixed.checksum) return bad("damaged: its checksum is another");
    entry.image.about = rest.substr(0, fixed.about_bytes);
    entry.image.log = rest.substr(fixed.about_bytes, fixed.log_bytes);
    entry.image.bytes = rest.substr(fixed.about_bytes + fixed.log_bytes);
    entry.image.is_ptx = fixed.is_ptx != 0;
    if (trust == Cache::Trust::own && how == Read::use) {
        // Eviction goes by last use, and file systems are often mounted so that reading leaves no trace.
        const timespec times[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
        futimens(file.fd(), times);
    }
    return entry;
}

bool make_directory(const std::string& path) {
    if (path.empty()) return false;
    if (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return true;
    if (errno != ENOENT) return false;
    const size_t slash = path.find_last_of('/');
    if (slash == std::string::npos || slash == 0 || !make_directory(path.substr(0, slash))) return false;
    return mkdir(path.c_str(), 0700) == 0 || errno == EEXIST;
}

// Waits for whoever compiles this kernel. Not to get the lock is no error: the work is done twice, with the same
// result.
class Lock {
public:
    explicit Lock(std::string path)
        : path_(std::move(path)), file_(path_, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK, 0600) {
        if (!file_) return;
        const auto end = std::chrono::steady_clock::now() + kLockTimeout;
        auto pause = std::chrono::microseconds(500);
        while (flock(file_.fd(), LOCK_EX | LOCK_NB) != 0) {
            if (errno == EINTR) continue;
            if (errno != EWOULDBLOCK || std::chrono::steady_clock::now() > end) return;
            std::this_thread::sleep_for(pause);
            pause = std::min(pause * 2, std::chrono::microseconds(20000));
        }
        held_ = true;
    }
    // The entry is there by now: who makes a new lock file looks again and finds it. (If it could not be made, or the
    // disk does not take it, nobody gains by waiting.)
    ~Lock() {
        if (held_) unlink(path_.c_str());
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

private:
    std::string path_;
    File file_;  // closing it gives the lock back
    bool held_ = false;
};

std::string key_of(const std::string& material) { return hex(sha256(material)); }

}  // namespace

Cache::Cache(std::string directory, uint64_t max_bytes, Trust trust)
    : directory_(std::move(directory)), max_bytes_(max_bytes), trust_(trust) {
    while (directory_.size() > 1 && directory_.back() == '/') directory_.pop_back();
}

std::string Cache::file_name(const std::string& key_material) { return key_of(key_material) + std::string(kSuffix); }

std::optional<Image> Cache::find(const std::string& key_material) const {
    if (!enabled()) return std::nullopt;
    const std::string key = key_of(key_material);
    Opened entry = read_entry(directory_ + "/" + key + std::string(kSuffix), key, trust_, Read::use);
    if (!entry.problem.empty()) return std::nullopt;
    return std::move(entry.image);
}

Image Cache::get_or_compile(const std::string& key_material, const std::function<Image()>& compile) const {
    if (std::optional<Image> image = find(key_material)) return std::move(*image);
    if (!enabled() || trust_ != Trust::own || !make_directory(directory_)) return compile();
    const Lock lock(directory_ + "/" + key_of(key_material) + std::string(kLockSuffix));
    if (std::optional<Image> image = find(key_material)) return std::move(*image);
    Image image = compile();
    publish(key_material, image);
    return image;
}

bool Cache::publish(const std::string& key_material, const Image& image) const {
    if (!enabled() || trust_ != Trust::own) return false;
    const Digest key = sha256(key_material);
    const std::string bytes = pack(key, image);
    if (bytes.size() > max_bytes_ || bytes.size() > kMaxFile || !make_directory(directory_)) return false;

    static std::atomic<unsigned> count{0};
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    const std::string temporary = directory_ + "/" + std::string(kTemporary) + std::to_string(getpid()) + "-" +
                                  std::to_string(count.fetch_add(1)) + "-" + std::to_string(now);
    File file(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
    if (!file) return false;
    // On disk before it gets its name: after a power cut there is a whole file or none.
    const bool written = write_all(file.fd(), bytes) && fsync(file.fd()) == 0;
    const bool closed = file.close();
    if (!written || !closed ||
        rename(temporary.c_str(), (directory_ + "/" + hex(key) + std::string(kSuffix)).c_str())) {
        unlink(temporary.c_str());
        return false;
    }
    evict();
    return true;
}

std::vector<CacheEntry> Cache::scan(bool everything) const {
    std::vector<CacheEntry> entries;
    if (directory_.empty()) return entries;
    for (const std::string& name : names_in(directory_)) {
        if (!name.ends_with(kSuffix)) continue;
        const std::string key = name.substr(0, name.size() - kSuffix.size());
        const std::string path = directory_ + "/" + name;
        struct stat info{};
        if (lstat(path.c_str(), &info) != 0) continue;                             // evicted meanwhile
        const int64_t last_use = std::max<int64_t>(info.st_atime, info.st_mtime);  // before looking changes it
        Opened entry = read_entry(path, key, trust_, everything ? Read::check : Read::header);
        entries.push_back({key, entry.image.about, static_cast<uint64_t>(info.st_size), last_use, entry.problem});
    }
    return entries;
}

std::vector<CacheEntry> Cache::ls() const { return scan(false); }
std::vector<CacheEntry> Cache::verify() const { return scan(true); }

uint64_t Cache::clear() const {
    uint64_t removed = 0;
    if (directory_.empty() || trust_ != Trust::own) return removed;
    for (const std::string& name : names_in(directory_)) {
        const bool entry = name.ends_with(kSuffix);
        if (!entry && !name.ends_with(kLockSuffix) && !name.starts_with(kTemporary)) continue;
        if (unlink((directory_ + "/" + name).c_str()) == 0 && entry) ++removed;
    }
    return removed;
}

void Cache::evict() const {
    struct Old {
        timespec used;
        uint64_t bytes;
        std::string path;
    };
    std::vector<Old> entries;
    uint64_t total = 0;
    const int64_t now = std::time(nullptr);
    for (const std::string& name : names_in(directory_)) {
        const std::string path = directory_ + "/" + name;
        struct stat info{};
        if (lstat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
        if (name.starts_with(kTemporary) || name.ends_with(kLockSuffix)) {
            if (now - info.st_mtime < kLeftoverSeconds) continue;
            const File leftover(path, O_RDONLY | O_NOFOLLOW);
            if (leftover && flock(leftover.fd(), LOCK_EX | LOCK_NB) == 0) unlink(path.c_str());
        } else if (name.ends_with(kSuffix)) {
            const auto later = [](const timespec& a, const timespec& b) {
                return a.tv_sec != b.tv_sec ? a.tv_sec > b.tv_sec : a.tv_nsec > b.tv_nsec;
            };
            const timespec used = later(info.st_atim, info.st_mtim) ? info.st_atim : info.st_mtim;
            entries.push_back({used, static_cast<uint64_t>(info.st_size), path});
            total += entries.back().bytes;
        }
    }
    if (total <= max_bytes_) return;
    std::sort(entries.begin(), entries.end(), [](const Old& a, const Old& b) {
        return a.used.tv_sec != b.used.tv_sec ? a.used.tv_sec < b.used.tv_sec : a.used.tv_nsec < b.used.tv_nsec;
    });
    for (const Old& entry : entries) {
        if (total <= max_bytes_) break;
        if (unlink(entry.path.c_str()) == 0) total -= entry.bytes;
    }
}

Cache user_cache() {
    uint64_t megabytes = 1024;
    if (const std::string text = core::env("TILEWISE_CACHE_MAX_MB"); !text.empty()) {
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), megabytes);
        if (error != std::errc() || end != text.data() + text.size() || megabytes > (uint64_t{1} << 40)) {
            core::refuse("TILEWISE_CACHE_MAX_MB", "\"" + text + "\"", "a whole number of MiB; 0 turns the cache off");
        }
    }
    std::string directory = core::env("TILEWISE_CACHE_DIR");
    if (directory.empty()) {
        const std::string xdg = core::env("XDG_CACHE_HOME"), home = core::env("HOME");
        if (!xdg.empty() && xdg[0] == '/') {  // the standard says to ignore relative paths
            directory = xdg + "/tilewise";
        } else if (!home.empty()) {
            directory = home + "/.cache/tilewise";
        }
    }
    return {directory, megabytes << 20};
}

std::vector<Cache> packs() {
    std::vector<Cache> list;
    const std::string text = core::env("TILEWISE_PACKS");
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(':', at), text.size());
        if (end > at) list.emplace_back(text.substr(at, end - at), UINT64_MAX, Cache::Trust::pack);
        at = end + 1;
    }
    return list;
}

}  // namespace tilewise::jit
