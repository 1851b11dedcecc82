// src/jit without a GPU: names of archs, keys, the cache under every kind of damage and race, NVRTC where there is one.
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "core/env.hpp"
#include "core/error.hpp"
#include "jit/arch.hpp"
#include "jit/cache.hpp"
#include "jit/nvrtc.hpp"
#include "jit/sha256.hpp"
#include "jit/source.hpp"
#include "jit/store.hpp"

namespace tilewise::jit {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr uint64_t kPlenty = uint64_t{1} << 30;

class Folder {
public:
    Folder() {
        std::string name = (fs::temp_directory_path() / "tilewise-test-XXXXXX").string();
        path_ = mkdtemp(name.data());
    }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
    [[nodiscard]] std::string path(const std::string& name = "") const {
        return name.empty() ? path_ : path_ + "/" + name;
    }

private:
    std::string path_;
};

class Environment {  // one variable, for the length of a test
public:
    Environment(const char* name, const std::string& value) : name_(name), before_(core::env(name)) {
        setenv(name, value.c_str(), 1);
    }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;
    ~Environment() {
        if (before_.empty()) unsetenv(name_);
        else setenv(name_, before_.c_str(), 1);
    }

private:
    const char* name_;
    std::string before_;
};

std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

void count_in(const std::string& file) {  // atomic between processes
    const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    EXPECT_EQ(write(fd, "x", 1), 1);
    close(fd);
}

std::string message_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const core::Error& error) {
        return error.what();
    }
    return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Runs body in a process of its own; true if it says so. A failure there must not run the parent's tests to their end.
bool in_child(const std::function<bool()>& body) {
    const pid_t pid = fork();
    if (pid == 0) {
        bool good = false;
        try {
            good = body();
        } catch (const std::exception& error) {
            fprintf(stderr, "in child: %s\n", error.what());
        }
        fflush(nullptr);
        _exit(good ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

Image image_of(const std::string& text) { return {text, false, "log of " + text, "about " + text}; }

Image never() {
    ADD_FAILURE() << "compiled although it was there";
    return {};
}

// ---------------------------------------------------------------------------------------------------------------------
// Names and keys

TEST(JitArch, Names) {
    EXPECT_EQ(Arch::parse("90a"), (Arch{9, 0, true}));
    EXPECT_EQ(Arch::parse("sm_75"), (Arch{7, 5, false}));
    EXPECT_EQ(Arch::parse("compute_120"), (Arch{12, 0, false}));
    EXPECT_EQ(Arch::parse("8.6"), (Arch{8, 6, false}));
    EXPECT_EQ(Arch::parse("sm_103a").name(), "sm_103a");
    EXPECT_EQ(Arch::parse("90a").virtual_name(), "compute_90a");
    for (const char* bad : {"", "a", "sm_", "sm_9", "9o", "90b", "sm_90aa", "1234", "-80"})
        EXPECT_TRUE(contains(message_of([&] { (void)Arch::parse(bad); }), "arch")) << bad;
}

TEST(JitArch, AnOlderOneCanBeAskedFor) {
    const auto arch = [](const char* text) {
        const Environment forced("TILEWISE_GPU_ARCH", text);
        return kernel_arch(9, 0).number();
    };
    EXPECT_EQ(arch(""), 90);
    EXPECT_EQ(arch("75"), 75);
    EXPECT_EQ(arch("sm_80"), 80);
    for (const char* wrong : {"100", "90a", "next"}) EXPECT_THROW(arch(wrong), tilewise::core::Error) << wrong;
}

TEST(JitArch, TargetOfAGpu) {
    const std::vector<int> known{75, 80, 86, 90, 120};
    const auto target = [&](const char* gpu) { return choose_target(Arch::parse(gpu), known, "NVRTC"); };
    EXPECT_EQ(target("86").arch.name(), "sm_86");
    EXPECT_FALSE(target("86").ptx);
    EXPECT_EQ(target("90a").arch.name(), "sm_90a");
    EXPECT_EQ(target("121").arch.number(), 120);  // newer than the compiler
    EXPECT_TRUE(target("121").ptx);
    EXPECT_EQ(target("89").arch.number(), 86);
    EXPECT_TRUE(contains(message_of([&] { target("70"); }), "sm_75, sm_80, sm_86, sm_90, sm_120"));
    EXPECT_TRUE(contains(message_of([&] { target("70"); }), "nvidia-cuda-nvrtc-cu12"));
    EXPECT_TRUE(contains(message_of([&] { target("100a"); }), "newer NVRTC"));
}

TEST(JitKey, Sha256) {
    EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(hex(sha256(std::string(1000000, 'a'))),
              "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(JitKey, EveryPartCounts) {
    const Source base{"k.cu", "text", {{"a.cuh", "A"}, {"b.cuh", "B"}}, {"-x", "-y"}, false};
    const Target target{{9, 0, false}, false};
    std::set<std::string> keys{key_material(base, target, "NVRTC 1")};
    size_t wanted = 1;
    const auto differs = [&](const auto& change) {
        Source source = base;
        Target t = target;
        std::string compiler = "NVRTC 1";
        change(source, t, compiler);
        keys.insert(key_material(source, t, compiler));
        EXPECT_EQ(keys.size(), ++wanted);
    };
    differs([](Source& s, Target&, std::string&) { s.text = "text2"; });
    differs([](Source& s, Target&, std::string&) { s.name = "l.cu"; });
    differs([](Source& s, Target&, std::string&) { s.headers[1].text = "C"; });
    differs([](Source& s, Target&, std::string&) { s.headers[1].name = "c.cuh"; });
    differs([](Source& s, Target&, std::string&) { s.headers.pop_back(); });
    differs([](Source& s, Target&, std::string&) { s.options.pop_back(); });
    differs([](Source& s, Target&, std::string&) { s.options = {"-x -y"}; });
    differs([](Source& s, Target&, std::string&) { s.options = {"-y", "-x"}; });
    differs([](Source&, Target& t, std::string&) { t.arch.specific = true; });
    differs([](Source&, Target& t, std::string&) { t.ptx = true; });
    differs([](Source&, Target& t, std::string&) { t.arch.minor = 1; });
    differs([](Source&, Target&, std::string& c) { c = "NVRTC 2"; });
}

TEST(JitSource, EmbeddedTextIsThatOfTheFiles) {
    const fs::path folder = fs::path(__FILE__).parent_path().parent_path() / "kernels/tilewise";
    if (!fs::exists(folder)) GTEST_SKIP() << "no " << folder;
    const std::vector<std::string> names = kernel_files();
    std::set<std::string> embedded(names.begin(), names.end()), there;
    for (const auto& entry : fs::recursive_directory_iterator(folder)) {
        if (!entry.is_regular_file()) continue;
        const std::string name = fs::relative(entry.path(), folder).string();
        there.insert(name);
        if (embedded.count(name)) EXPECT_EQ(kernel_text(name), read_file(entry.path())) << name;
    }
    EXPECT_EQ(embedded, there);
    EXPECT_TRUE(contains(message_of([] { (void)kernel_text("no such.cuh"); }), "no such.cuh"));
}

// ---------------------------------------------------------------------------------------------------------------------
// The cache

TEST(JitCache, KeepsWhatItIsGiven) {
    const Folder folder;
    const Cache cache(folder.path("deep/er/"), kPlenty);
    EXPECT_FALSE(cache.find("k"));
    const std::string bytes("\0cubin\n\xff", 8);
    const Image image{bytes, true, "a warning", "k.cu sm_90"};
    EXPECT_EQ(cache.get_or_compile("k", [&] { return Image(image); }).bytes, bytes);
    const Image found = cache.get_or_compile("k", never);
    EXPECT_EQ(found.bytes, bytes);
    EXPECT_TRUE(found.is_ptx);
    EXPECT_EQ(found.log, "a warning");
    EXPECT_EQ(found.about, "k.cu sm_90");
    EXPECT_FALSE(cache.find("l"));

    EXPECT_EQ(fs::status(folder.path("deep/er")).permissions(), fs::perms::owner_all);
    const std::vector<CacheEntry> entries = cache.ls();
    ASSERT_EQ(entries.size(), 1u);
    EXPECT_EQ(entries[0].about, "k.cu sm_90");
    EXPECT_EQ(entries[0].problem, "");
    EXPECT_EQ(entries[0].key + ".twk", Cache::file_name("k"));
    EXPECT_NEAR(static_cast<double>(entries[0].last_use), static_cast<double>(time(nullptr)), 60);
    EXPECT_EQ(cache.verify()[0].problem, "");
    // Nothing else is left behind: no lock, no temporary file.
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path("deep/er")), fs::directory_iterator()), 1);
    EXPECT_EQ(cache.clear(), 1u);
    EXPECT_FALSE(cache.find("k"));
}

TEST(JitCache, EmptyImageAndEmptyDirectory) {
    const Folder folder;
    const Cache cache(folder.path(), kPlenty);
    EXPECT_TRUE(cache.publish("k", {}));
    EXPECT_EQ(cache.get_or_compile("k", never).bytes, "");
    for (const Cache& none : {Cache("", kPlenty), Cache(folder.path(), 0)}) {
        EXPECT_EQ(none.get_or_compile("k", [] { return image_of("x"); }).bytes, "x");
        EXPECT_FALSE(none.find("k"));
        EXPECT_FALSE(none.publish("k", {}));
    }
}

TEST(JitCache, FailureToCompileIsPassedOnAndNotKept) {
    const Folder folder;
    const Cache cache(folder.path(), kPlenty);
    const auto fails = [&] {
        (void)cache.get_or_compile("k", []() -> Image { throw core::Error(core::Status::internal, "no"); });
    };
    EXPECT_EQ(message_of(fails), "no");
    EXPECT_EQ(cache.get_or_compile("k", [] { return image_of("x"); }).bytes, "x");
    EXPECT_EQ(cache.get_or_compile("k", never).bytes, "x");
}

// Sixteen processes start at once, as the ranks of a job do.
TEST(JitCache, ManyProcessesCompileOnce) {
    constexpr int kProcesses = 16, kKernels = 3;
    const Folder folder;
    int gate[2];
    ASSERT_EQ(pipe(gate), 0);
    std::vector<pid_t> children;
    for (int rank = 0; rank < kProcesses; ++rank) {
        const pid_t pid = fork();
        if (pid == 0) {
            close(gate[1]);
            char byte = 0;
            if (read(gate[0], &byte, 1) != 0) _exit(2);  // until the parent closes its end
            const Cache cache(folder.path("cache"), kPlenty);
            bool good = true;
            for (int i = 0; i < kKernels; ++i) {
                const std::string name = "kernel " + std::to_string((i + rank) % kKernels);
                const Image image = cache.get_or_compile(name, [&] {
                    count_in(folder.path(name));
                    std::this_thread::sleep_for(milliseconds(200));
                    return image_of(name);
                });
                good = good && image.bytes == name;
            }
            _exit(good ? 0 : 1);
        }
        children.push_back(pid);
    }
    close(gate[0]);
    close(gate[1]);
    for (const pid_t pid : children) {
        int status = 0;
        ASSERT_EQ(waitpid(pid, &status, 0), pid);
        EXPECT_EQ(status, 0);
    }
    for (int i = 0; i < kKernels; ++i) EXPECT_EQ(fs::file_size(folder.path("kernel " + std::to_string(i))), 1u);
    EXPECT_EQ(Cache(folder.path("cache"), kPlenty).verify().size(), size_t{kKernels});
}

TEST(JitCache, ManyThreadsCompileOnce) {
    const Folder folder;
    const Cache cache(folder.path(), kPlenty);
    std::atomic<int> compiled{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; ++i) {
        threads.emplace_back([&] {
            const Image image = cache.get_or_compile("k", [&] {
                ++compiled;
                std::this_thread::sleep_for(milliseconds(50));
                return image_of("x");
            });
            EXPECT_EQ(image.bytes, "x");
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(compiled, 1);
}

TEST(JitCache, KilledWhileItPublishes) {
    const Folder folder;
    std::mt19937 random(7);
    const std::string big(8 << 20, 'b');
    for (int round = 0; round < 12; ++round) {
        const pid_t pid = fork();
        if (pid == 0) {
            const Cache cache(folder.path(), kPlenty);
            for (int i = 0;; ++i) cache.publish("k" + std::to_string(i % 4), {big, false, "", std::to_string(i)});
        }
        std::this_thread::sleep_for(milliseconds(5 + random() % 120));
        kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
        const Cache cache(folder.path(), kPlenty);
        for (const CacheEntry& entry : cache.verify()) EXPECT_EQ(entry.problem, "");
        for (int i = 0; i < 4; ++i) {
            if (const auto image = cache.find("k" + std::to_string(i))) EXPECT_EQ(image->bytes, big);
        }
    }
}

TEST(JitCache, KilledWhileItCompiles) {
    const Folder folder;
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        (void)Cache(folder.path(), kPlenty).get_or_compile("k", [&]() -> Image {
            if (write(ready[1], "x", 1) != 1) _exit(1);
            for (;;) pause();
        });
    }
    char byte = 0;
    ASSERT_EQ(read(ready[0], &byte, 1), 1);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    close(ready[0]);
    close(ready[1]);
    const auto before = std::chrono::steady_clock::now();
    EXPECT_EQ(Cache(folder.path(), kPlenty).get_or_compile("k", [] { return image_of("x"); }).bytes, "x");
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(10));
}

TEST(JitCache, DamagedFilesAreMissesAndReplaced) {
    const Folder folder;
    const Cache cache(folder.path(), kPlenty);
    ASSERT_TRUE(cache.publish("k", image_of("cubin")));
    const fs::path file = folder.path(Cache::file_name("k"));
    const std::string sound = read_file(file);

    const auto damaged = [&](const std::string& bytes, const std::string& how) {
        write_file(file, bytes);
        EXPECT_FALSE(cache.find("k")) << how;
        ASSERT_EQ(cache.verify().size(), 1u);
        EXPECT_NE(cache.verify()[0].problem, "") << how;
    };
    for (size_t length = 0; length < sound.size(); ++length)
        damaged(sound.substr(0, length), "cut to " + std::to_string(length));
    damaged(sound + "x", "longer");
    for (size_t at = 0; at < sound.size(); ++at) {
        std::string bytes = sound;
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << at % 8));
        damaged(bytes, "bit of byte " + std::to_string(at));
    }
    // The entry of another key under this name.
    ASSERT_TRUE(cache.publish("other", image_of("other")));
    fs::rename(folder.path(Cache::file_name("other")), file);
    EXPECT_FALSE(cache.find("k"));

    EXPECT_EQ(cache.get_or_compile("k", [] { return image_of("cubin"); }).bytes, "cubin");
    EXPECT_EQ(read_file(file), sound);
}

TEST(JitCache, FilesThatOthersMayHaveWrittenAreIgnored) {
    const Folder folder;
    const Cache cache(folder.path(), kPlenty);
    const fs::path file = folder.path(Cache::file_name("k"));
    const auto ignored = [&](const std::string& problem) {
        EXPECT_FALSE(cache.find("k")) << problem;
        EXPECT_TRUE(contains(cache.ls().at(0).problem, problem)) << cache.ls().at(0).problem;
        EXPECT_EQ(cache.get_or_compile("k", [] { return image_of("mine"); }).bytes, "mine");
        EXPECT_EQ(cache.get_or_compile("k", never).bytes, "mine") << "not replaced: " << problem;
    };
    for (const mode_t mode : {0666, 0620, 0602}) {
        ASSERT_TRUE(cache.publish("k", image_of("theirs")));
        ASSERT_EQ(chmod(file.c_str(), mode), 0);
        ignored("may write");
    }
    // A link, a folder and a pipe in its place: neither followed nor waited for.
    ASSERT_TRUE(cache.publish("k", image_of("theirs")));
    fs::rename(file, folder.path("elsewhere"));
    fs::create_symlink(folder.path("elsewhere"), file);
    ignored("");
    fs::remove(file);
    ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
    ignored("regular");
    fs::remove(file);
    fs::create_directory(file);
    EXPECT_EQ(cache.get_or_compile("k", [] { return image_of("mine"); }).bytes, "mine");
    fs::remove(file);
    if (geteuid() != 0) GTEST_SKIP() << "only root can make files of another user";
    ASSERT_TRUE(cache.publish("k", image_of("theirs")));
    ASSERT_EQ(chown(file.c_str(), 65534, 65534), 0);
    ignored("another user");
}

TEST(JitCache, WorksWithoutADisk) {
    const Folder folder;
    const auto works = [](const std::string& directory) {
        const Cache cache(directory, kPlenty);
        return cache.get_or_compile("k", [] { return image_of("x"); }).bytes == "x" && !cache.find("k") &&
               cache.ls().empty();
    };
    write_file(folder.path("file"), "");
    EXPECT_TRUE(works(folder.path("file")));
    EXPECT_TRUE(works(folder.path("file/below")));
    EXPECT_TRUE(works("/proc/self/tilewise"));
    // Read-only, for a user for whom that means something.
    EXPECT_TRUE(in_child([&] {
        mkdir(folder.path("readonly").c_str(), 0555);
        if (geteuid() == 0 && (chmod(folder.path().c_str(), 0755) != 0 || setuid(65534) != 0)) return false;
        return works(folder.path("readonly")) && works(folder.path("readonly/below"));
    }));
    // Full: no file may grow past a size.
    EXPECT_TRUE(in_child([&] {
        signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{64, 64};
        setrlimit(RLIMIT_FSIZE, &limit);
        return works(folder.path("full")) && fs::is_empty(folder.path("full"));
    }));
}

TEST(JitCache, ReadsWhereItMayNotWrite) {
    const Folder folder;
    const Cache cache(folder.path("cache"), kPlenty);
    EXPECT_TRUE(in_child([&] {
        chmod(folder.path().c_str(), 0777);
        if (geteuid() == 0 && setuid(65534) != 0) return false;
        if (!cache.publish("k", image_of("x"))) return false;
        chmod(cache.directory().c_str(), 0500);
        const bool found = cache.get_or_compile("k", never).bytes == "x";
        chmod(cache.directory().c_str(), 0700);
        return found;
    }));
}

TEST(JitCache, EvictsWhatWasNotUsedForLongest) {
    const Folder folder;
    const std::string big(1000, 'b');
    const auto put = [&](const std::string& key, uint64_t max_bytes) {
        EXPECT_TRUE(Cache(folder.path(), max_bytes).publish(key, image_of(big + key)));
        std::this_thread::sleep_for(milliseconds(20));  // the clock of the file system is coarse
    };
    const Cache cache(folder.path(), kPlenty);
    put("a", kPlenty), put("b", kPlenty), put("c", kPlenty);
    const uint64_t size = cache.ls()[0].bytes;
    EXPECT_TRUE(cache.find("a"));
    std::this_thread::sleep_for(milliseconds(20));
    (void)cache.verify(), (void)cache.ls();  // looking is no use
    put("d", 3 * size);
    EXPECT_TRUE(cache.find("a"));
    EXPECT_FALSE(cache.find("b"));
    EXPECT_TRUE(cache.find("c"));
    EXPECT_TRUE(cache.find("d"));
    EXPECT_FALSE(Cache(folder.path(), size - 1).publish("e", image_of(big + "e"))) << "larger than the whole cache";
    EXPECT_EQ(cache.ls().size(), 3u);
    // What a killed process left behind goes too, once it is old.
    write_file(folder.path(".tmp-1-2-3"), "left"), write_file(folder.path("x.lock"), ""),
        write_file(folder.path(".tmp-new"), "");
    const timespec old[2] = {{time(nullptr) - 7200, 0}, {time(nullptr) - 7200, 0}};
    for (const char* name : {".tmp-1-2-3", "x.lock"}) utimensat(AT_FDCWD, folder.path(name).c_str(), old, 0);
    put("f", kPlenty);
    EXPECT_FALSE(fs::exists(folder.path(".tmp-1-2-3")));
    EXPECT_FALSE(fs::exists(folder.path("x.lock")));
    EXPECT_TRUE(fs::exists(folder.path(".tmp-new")));
}

TEST(JitCache, PlacesAndSizesOfTheEnvironment) {
    {
        const Environment directory("TILEWISE_CACHE_DIR", "/somewhere/"), size("TILEWISE_CACHE_MAX_MB", "3");
        EXPECT_EQ(user_cache().directory(), "/somewhere");
        EXPECT_EQ(user_cache().max_bytes(), 3u << 20);
    }
    {
        const Environment bad("TILEWISE_CACHE_MAX_MB", "3GB");
        EXPECT_TRUE(contains(message_of([] { (void)user_cache(); }), "TILEWISE_CACHE_MAX_MB"));
    }
    const Environment none("TILEWISE_CACHE_DIR", ""), home("HOME", "/home/somebody");
    {
        const Environment xdg("XDG_CACHE_HOME", "/xdg");
        EXPECT_EQ(user_cache().directory(), "/xdg/tilewise");
    }
    {
        const Environment xdg("XDG_CACHE_HOME", "relative");
        EXPECT_EQ(user_cache().directory(), "/home/somebody/.cache/tilewise");
    }
    const Environment two("TILEWISE_PACKS", ":/a::/b/:");
    ASSERT_EQ(packs().size(), 2u);
    EXPECT_EQ(packs()[0].directory(), "/a");
    EXPECT_EQ(packs()[1].directory(), "/b");
}

TEST(JitCache, PacksAreNeverWrittenTo) {
    const Folder folder;
    ASSERT_TRUE(Cache(folder.path(), kPlenty).publish("k", image_of("x")));
    const Cache pack(folder.path(), kPlenty, Cache::Trust::pack);
    EXPECT_EQ(pack.get_or_compile("k", never).bytes, "x");
    EXPECT_EQ(pack.get_or_compile("l", [] { return image_of("y"); }).bytes, "y");
    EXPECT_FALSE(pack.publish("l", image_of("y")));
    EXPECT_EQ(pack.clear(), 0u);
    EXPECT_EQ(pack.ls().size(), 1u);
    // Installed by a package manager with a friendly umask, but not writable by the world.
    const fs::path file = folder.path(Cache::file_name("k"));
    ASSERT_EQ(chmod(file.c_str(), 0664), 0);
    EXPECT_TRUE(pack.find("k"));
    ASSERT_EQ(chmod(file.c_str(), 0666), 0);
    EXPECT_FALSE(pack.find("k"));
}

// ---------------------------------------------------------------------------------------------------------------------
// NVRTC

const Source& trivial() {
    static const Source source{
        "trivial.cu",
        "#include \"inner.cuh\"\n"
        "extern \"C\" __global__ void trivial(const __grid_constant__ Params p) { p.data[threadIdx.x] = kValue; }\n",
        {{"inner.cuh", "struct Params { int* data; };\nconstexpr int kValue = 3;\n"}},
        {},
        false};
    return source;
}

// Folders with an NVRTC that only tests know: TILEWISE_TEST_NVRTC, and pip's packages in the checkout's environment.
std::vector<std::string> nvrtc_folders() {
    std::vector<std::string> folders;
    const char* given = std::getenv("TILEWISE_TEST_NVRTC");  // NOLINT(concurrency-mt-unsafe)
    std::string text = given ? given : "";
    for (size_t end = 0; !text.empty(); text.erase(0, end + 1)) {
        end = std::min(text.find(':'), text.size() - 1);
        folders.push_back(text.substr(0, text[end] == ':' ? end : end + 1));
    }
    const fs::path venv = fs::path(__FILE__).parent_path().parent_path() / ".venv/lib";
    std::error_code ignored;
    for (const auto& python : fs::directory_iterator(venv, ignored)) {
        for (const auto& package : fs::directory_iterator(python.path() / "site-packages/nvidia", ignored))
            folders.push_back((package.path() / "lib").string());
    }
    return folders;
}

class JitNvrtc : public ::testing::Test {
protected:
    void SetUp() override { set_search_path(nvrtc_folders()); }
    void TearDown() override { set_search_path({}); }
    const Nvrtc* find(int driver_version = 0) {
        std::string searched;
        const Nvrtc* nvrtc = find_nvrtc(driver_version, nullptr, &searched);
        skip_reason_ = "no NVRTC here: pip install nvidia-cuda-nvrtc. Searched: " + searched;
        return nvrtc;
    }
    std::string skip_reason_;
};

TEST_F(JitNvrtc, CompilesForEveryArchItKnows) {
    if (!find()) GTEST_SKIP() << skip_reason_;
    for (const int driver_version : {13000, 12000}) {  // the newest, and one of CUDA 12 if there is one
        const Nvrtc* nvrtc = find(driver_version);
        if (nvrtc == nullptr) continue;
        EXPECT_LE(nvrtc->major(), driver_version / 1000);
        EXPECT_TRUE(contains(nvrtc->identity(), nvrtc->name()));
        std::set<std::string> different;
        for (const int number : nvrtc->archs()) {
            if (number < 75) continue;
            for (const bool specific : {false, true}) {
                if (specific && number < 90) continue;
                const Arch arch{number / 10, number % 10, specific};
                const Image image = nvrtc->compile(trivial(), {arch, false});
                EXPECT_EQ(image.bytes.substr(0, 4), "\177ELF") << arch.name();
                EXPECT_FALSE(image.is_ptx);
                EXPECT_TRUE(contains(image.about, arch.name())) << image.about;
                different.insert(image.bytes);
            }
        }
        EXPECT_GE(different.size(), 5u) << nvrtc->name();
        const Image ptx = nvrtc->compile(trivial(), {{8, 0, false}, true});
        EXPECT_TRUE(ptx.is_ptx);
        EXPECT_TRUE(contains(ptx.bytes, ".target sm_80")) << ptx.bytes;
        EXPECT_TRUE(contains(ptx.bytes, "trivial"));
    }
}

TEST_F(JitNvrtc, ErrorsCarryTheLog) {
    const Nvrtc* nvrtc = find();
    if (!nvrtc) GTEST_SKIP() << skip_reason_;
    Source source = trivial();
    source.text += "__device__ int broken() { return no_such_name; }\n";
    const std::string text = message_of([&] { (void)nvrtc->compile(source, {{8, 0, false}, false}); });
    for (const char* part :
         {"trivial.cu does not compile for sm_80", "no_such_name", "trivial.cu(3)", "NVRTC_ERROR_COMPILATION"})
        EXPECT_TRUE(contains(text, part)) << part << " in:\n" << text;
    const std::string unknown = message_of([&] { (void)nvrtc->compile(trivial(), {{3, 0, false}, false}); });
    EXPECT_TRUE(contains(unknown, "sm_30")) << unknown;
    source = trivial();
    source.options = {"--no-such-option"};
    EXPECT_TRUE(contains(message_of([&] { (void)nvrtc->compile(source, {{8, 0, false}, false}); }), "no-such-option"));
    const std::string log = nvrtc->compile(trivial(), {{8, 0, false}, false}).log;  // usable afterwards
    for (const char* part : {"Compiling entry function 'trivial' for 'sm_80'", "0 bytes spill stores", "registers"})
        EXPECT_TRUE(contains(log, part)) << log;
    EXPECT_FALSE(contains(log, "warning")) << log;
}

TEST_F(JitNvrtc, FilesOfTheCurrentFolderStayOut) {
    const Nvrtc* nvrtc = find();
    if (!nvrtc) GTEST_SKIP() << skip_reason_;
    const Folder folder;
    const fs::path before = fs::current_path();
    fs::current_path(folder.path());
    write_file("outside.cuh", "constexpr int kOutside = 1;\n");
    write_file("inner.cuh", "#error the file of the current folder was taken\n");
    Source source = trivial();
    EXPECT_EQ(message_of([&] { (void)nvrtc->compile(source, {{8, 0, false}, false}); }), "no error");
    source.text = "#include \"outside.cuh\"\n" + source.text;
    EXPECT_TRUE(contains(message_of([&] { (void)nvrtc->compile(source, {{8, 0, false}, false}); }), "outside.cuh"));
    fs::current_path(before);
}

TEST_F(JitNvrtc, CompilesFromSeveralThreads) {
    const Nvrtc* nvrtc = find();
    if (!nvrtc) GTEST_SKIP() << skip_reason_;
    const std::string wanted = nvrtc->compile(trivial(), {{9, 0, true}, false}).bytes;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            for (int round = 0; round < 3; ++round)
                EXPECT_EQ(nvrtc->compile(trivial(), {{9, 0, true}, false}).bytes, wanted);
        });
    }
    for (std::thread& thread : threads) thread.join();
}

TEST_F(JitNvrtc, ManyProcessesCompileOnce) {
    if (!find()) GTEST_SKIP() << skip_reason_;
    const Folder folder;
    std::vector<pid_t> children;
    for (int rank = 0; rank < 16; ++rank) {
        const pid_t pid = fork();
        if (pid == 0) {
            try {
                const Nvrtc& nvrtc = require_nvrtc(0);
                const Target target{{9, 0, true}, false};
                const Image image = Cache(folder.path("cache"), kPlenty)
                                        .get_or_compile(key_material(trivial(), target, nvrtc.identity()), [&] {
                                            count_in(folder.path("count"));
                                            return nvrtc.compile(trivial(), target);
                                        });
                _exit(image.bytes.substr(0, 4) == "\177ELF" ? 0 : 1);
            } catch (const std::exception&) {
                _exit(2);
            }
        }
        children.push_back(pid);
    }
    for (const pid_t pid : children) {
        int status = 0;
        ASSERT_EQ(waitpid(pid, &status, 0), pid);
        EXPECT_EQ(status, 0);
    }
    EXPECT_EQ(fs::file_size(folder.path("count")), 1u);
}

TEST_F(JitNvrtc, ObtainsFromPackCacheOrCompiler) {
    if (!find()) GTEST_SKIP() << skip_reason_;
    const Folder folder;
    const Environment cache_directory("TILEWISE_CACHE_DIR", folder.path("cache"));
    const Image compiled = obtain(trivial(), 8, 6, 0);
    EXPECT_EQ(user_cache().ls().size(), 1u);
    EXPECT_EQ(obtain(trivial(), 8, 6, 0).bytes, compiled.bytes);
    EXPECT_EQ(user_cache().ls().size(), 1u);
    // A GPU that no compiler knows yet.
    EXPECT_TRUE(obtain(trivial(), 19, 9, 0).is_ptx);
    Source specific = trivial();
    specific.arch_specific = true;
    EXPECT_TRUE(contains(message_of([&] { (void)obtain(specific, 19, 9, 0); }), "newer NVRTC"));

    const Arch sm_80{8, 0, false}, sm_90{9, 0, false};
    Compiled packed = compile_ahead(trivial(), sm_80, false, 0, folder.path("pack"));
    EXPECT_EQ(packed.image.bytes.substr(0, 4), "\177ELF");
    EXPECT_FALSE(packed.from_cache);
    EXPECT_TRUE(fs::exists(packed.path)) << packed.path;
    packed = compile_ahead(trivial(), sm_80, false, 0, folder.path("pack"));
    EXPECT_TRUE(packed.from_cache);
    EXPECT_TRUE(compile_ahead(trivial(), sm_90, true, 0, folder.path("pack")).image.is_ptx);
    EXPECT_TRUE(
        contains(message_of([&] { (void)compile_ahead(trivial(), sm_80, false, 0, "/proc/self/x"); }), "/proc/self/x"));
    // Without a folder: where obtain() looks.
    const Image cached = compile_ahead(trivial(), {8, 6, false}, false, 0, "").image;
    EXPECT_EQ(cached.bytes, compiled.bytes);
    const Environment pack("TILEWISE_PACKS", folder.path("nothing") + ":" + folder.path("pack"));
    const Environment no_cache("TILEWISE_CACHE_MAX_MB", "0");
    constexpr int kNoCompiler = 11000;  // no NVRTC is old enough for this driver
    EXPECT_TRUE(contains(obtain(trivial(), 8, 0, kNoCompiler).about, "sm_80"));
    EXPECT_TRUE(contains(obtain(trivial(), 8, 9, kNoCompiler).about, "sm_80"))
        << "code of an earlier GPU of the family";
    EXPECT_TRUE(contains(obtain(trivial(), 12, 0, kNoCompiler).about, "compute_90")) << "PTX for later ones";
    const std::string miss = message_of([&] { (void)obtain(trivial(), 7, 5, kNoCompiler); });
    for (const char* part : {"trivial.cu", "sm_75", "not in a pack", "pip install nvidia-cuda-nvrtc-cu12"})
        EXPECT_TRUE(contains(miss, part)) << miss;
    EXPECT_TRUE(contains(miss, folder.path("pack"))) << miss;
}

TEST_F(JitNvrtc, NoneFoundSaysWhatToInstall) {
    const std::string none = message_of([] { (void)require_nvrtc(11080); });
    EXPECT_TRUE(contains(none, "pip install nvidia-cuda-nvrtc-cu12")) << none;
    EXPECT_TRUE(contains(none, "11.8")) << none;
    EXPECT_TRUE(contains(none, "TILEWISE_NVRTC")) << none;
}

TEST_F(JitNvrtc, UnusableFilesAreReportedAndPassedOver) {
    const Folder folder;
    write_file(folder.path("libnvrtc.so.12"), "not a library");
    fs::create_symlink("nowhere", folder.path("libnvrtc.so"));
    std::vector<std::string> folders = nvrtc_folders();
    folders.insert(folders.begin(), folder.path());
    set_search_path(folders);
    std::string searched;
    (void)find_nvrtc(12090, nullptr, &searched);
    EXPECT_TRUE(contains(searched, folder.path())) << searched;
    set_search_path({folder.path()});
    EXPECT_TRUE(contains(message_of([] { (void)require_nvrtc(11000); }), folder.path()));

    const auto forced = [&](const std::string& file) {
        const Environment variable("TILEWISE_NVRTC", file);
        return message_of([] { (void)require_nvrtc(0); });
    };
    EXPECT_TRUE(contains(forced(folder.path("libnvrtc.so.12")), "TILEWISE_NVRTC"));
    EXPECT_TRUE(contains(forced(folder.path("missing.so")), "not there"));
    EXPECT_TRUE(contains(forced("/proc/self/exe"), "TILEWISE_NVRTC"));
}

TEST_F(JitNvrtc, TheVariableForcesOne) {
    const Nvrtc* nvrtc = find();
    if (!nvrtc) GTEST_SKIP() << skip_reason_;
    const Environment variable("TILEWISE_NVRTC", nvrtc->path());
    set_search_path({});
    EXPECT_EQ(find_nvrtc(0), nvrtc);
    const std::string newer = message_of([&] { (void)find_nvrtc((nvrtc->major() - 1) * 1000); });
    EXPECT_TRUE(contains(newer, nvrtc->name())) << newer;
    EXPECT_TRUE(contains(newer, "the driver")) << newer;
}

}  // namespace
}  // namespace tilewise::jit
