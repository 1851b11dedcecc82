#include "compile_ahead.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <set>
#include <string_view>

#include "core/error.hpp"
#include "device.hpp"
#include "jit/attention_source.hpp"
#include "jit/cache.hpp"
#include "jit/mma_backward_spec.hpp"
#include "jit/mma_spec.hpp"
#include "jit/render_mask.hpp"
#include "jit/sm90_spec.hpp"
#include "jit/store.hpp"

namespace tilewise::cuda {
namespace {

using core::Pass;
using core::Problem;
using jit::Arch;

// ---------------------------------------------------------------------------------------------------------------------
// Which modules a problem needs

struct Family {
    const char* name;  // as in src/implementations.cpp
    Pass pass;
    // None: it does not take the problem on that GPU.
    std::vector<jit::Source> (*sources)(const Problem& p, const Arch& arch, std::string& why_not);
};

std::vector<jit::Source> forward_mma(const Problem& p, const Arch& arch, std::string& why_not) {
    const jit::MaskProgram mask = jit::render_mask(p);
    const auto spec = jit::mma_forward_spec(p, mask, arch, &why_not);
    if (!spec) return {};
    // As it is for long sequences of many heads, and as small and large GPUs of the arch lay this one out.
    std::vector<jit::MmaForwardSpec> layouts{*spec};
    for (const int num_sms : {16, 28, 48, 84, 132, 188})
        layouts.push_back(jit::mma_forward_layout(p, *spec, num_sms, jit::shared_limit(arch)).spec);
    std::vector<jit::Source> sources;
    std::set<std::string> known;
    for (const jit::MmaForwardSpec& layout : layouts) {
        const jit::Constants constants = layout.constants();
        if (known.insert(jit::text_of(layout, constants)).second)
            sources.push_back(jit::attention_source("fwd_mma.cu", layout, constants, p, mask));
    }
    sources.push_back(jit::plain_source("combine.cu"));
    return sources;
}

std::vector<jit::Source> forward_sm90(const Problem& p, const Arch& arch, std::string& why_not) {
    const jit::MaskProgram mask = jit::render_mask(p);
    std::vector<jit::Source> sources;
    std::set<std::string> known;
    for (const int64_t queries : {int64_t{512}, int64_t{1} << 20}) {  // few and many have tiles of their own
        Problem sized = p;
        sized.max_seqlen_q = queries;
        const auto spec = jit::sm90_forward_spec(sized, mask, arch, &why_not);
        if (!spec) return {};
        const jit::Constants constants = spec->constants();
        if (known.insert(jit::text_of(*spec, constants)).second)
            sources.push_back(jit::attention_source("fwd_sm90.cu", *spec, constants, p, mask));
    }
    if (jit::documents_may_be_sequences(p, mask)) {
        const jit::MaskProgram sequences = jit::render_mask(p, true);
        if (const auto spec = jit::sm90_forward_spec(p, sequences, arch, &why_not))
            sources.push_back(jit::attention_source("fwd_sm90.cu", *spec, spec->constants(), p, sequences));
        sources.push_back(jit::plain_source("documents.cu"));
    }
    // The fewest queries are left to fwd_mma.
    for (jit::Source& source : forward_mma(p, arch, why_not)) sources.push_back(std::move(source));
    return sources;
}

std::vector<jit::Source> forward_simt(const Problem& p, const Arch&, std::string&) {
    const jit::SimtSpec spec(p, Pass::forward);
    return {jit::attention_source("fwd_simt.cu", spec, spec.constants(Pass::forward), p, jit::render_mask(p))};
}

std::vector<jit::Source> backward_simt(const Problem& p, const Arch&, std::string&);

std::vector<jit::Source> backward_mma(const Problem& p, const Arch& arch, std::string& why_not) {
    const jit::MaskProgram mask = jit::render_mask(p);
    std::vector<jit::Source> sources{jit::plain_source("bwd_mma_finish.cu")};
    std::set<std::string> known;
    jit::OptionSpec options;
    for (const int64_t keys :
         {int64_t{1}, int64_t{1024}, int64_t{1} << 20}) {  // few, some and many have tiles of their own
        Problem sized = p;
        sized.max_seqlen_kv = keys;
        const auto spec = jit::mma_backward_spec(sized, mask, arch, &why_not);
        if (!spec) return {};
        options = *spec;
        const jit::Constants constants = spec->constants();
        if (known.insert(jit::text_of(*spec, constants)).second)
            sources.push_back(jit::attention_source("bwd_mma.cu", *spec, constants, p, mask));
    }
    // Gradients of these are left to the kernels of bwd_simt.
    if (options.bias || options.slopes || options.sinks) {
        for (jit::Source& source : backward_simt(p, arch, why_not)) sources.push_back(std::move(source));
    }
    return sources;
}

std::vector<jit::Source> backward_simt(const Problem& p, const Arch&, std::string&) {
    const jit::SimtSpec spec(p, Pass::backward);
    const jit::MaskProgram mask = jit::render_mask(p);
    const auto source = [&](const char* file) {
        return jit::attention_source(file, spec, spec.constants(Pass::backward), p, mask);
    };
    std::vector<jit::Source> sources{source("bwd_simt_delta.cu"), source("bwd_simt.cu")};
    // Gradients that score_mod's arrays may ask for, whether it reads them or not.
    const bool arrays = !p.score_mod.empty() && std::any_of(p.arrays.begin(), p.arrays.end(), [](const core::Array& a) {
        return core::is_float(a.dtype);
    });
    if (spec.bias || spec.slopes || spec.sinks || arrays) sources.push_back(source("bwd_simt_shared.cu"));
    return sources;
}

constexpr Family kFamilies[] = {
    {"fwd_sm90", Pass::forward, forward_sm90},   {"fwd_mma", Pass::forward, forward_mma},
    {"fwd_simt", Pass::forward, forward_simt},   {"bwd_mma", Pass::backward, backward_mma},
    {"bwd_simt", Pass::backward, backward_simt},
};

std::string_view plain(std::string_view family) {
    return family.starts_with("fwd_") || family.starts_with("bwd_") ? family.substr(4) : family;
}

// The best family for the GPU, and what it compiles; with a backend, that one or none.
struct Choice {
    const Family* family;
    std::vector<jit::Source> sources;
};
Choice choose(const Problem& p, Pass pass, const Arch& arch) {
    std::string names;
    for (const Family& family : kFamilies) {
        if (family.pass != pass) continue;
        if (p.backend.empty() || plain(p.backend) == plain(family.name)) {
            std::string why_not = "it is for other GPUs";
            std::vector<jit::Source> sources = family.sources(p, arch, why_not);
            if (!sources.empty()) return {&family, std::move(sources)};
            if (!p.backend.empty())
                throw core::Error(core::Status::unsupported, std::string(family.name) + ": " + why_not + ".");
        }
        names += (names.empty() ? "" : ", ") + std::string(family.name);
    }
    core::refuse("backend", "\"" + p.backend + "\"", names, "Only GPU kernels are compiled beforehand.");
}

// ---------------------------------------------------------------------------------------------------------------------
// JSON

std::string quoted(std::string_view text) {
    std::string out = "\"";
    for (const char c : text) {
        const auto byte = static_cast<unsigned char>(c);
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (c == '\n') {
            out += "\\n";
        } else if (byte < 0x20 || byte == 0x7f) {
            std::array<char, 8> code{};
            std::snprintf(code.data(), code.size(), "\\u%04x", byte);
            out += code.data();
        } else {
            out += c;
        }
    }
    return out + '"';
}

class Line {  // one object
public:
    Line& text(const char* name, std::string_view value) { return raw(name, quoted(value)); }
    Line& number(const char* name, int64_t value) { return raw(name, std::to_string(value)); }
    Line& known(const char* name, int value) { return raw(name, value < 0 ? "null" : std::to_string(value)); }
    Line& raw(const char* name, std::string_view value) {
        text_ += text_.empty() ? "{" : ", ";
        text_ += quoted(name) + ": ";
        text_ += value;
        return *this;
    }
    [[nodiscard]] std::string str() const { return text_ + "}\n"; }

private:
    std::string text_;
};

std::string report(const Family& family, const jit::Source& source, const jit::Compiled& compiled) {
    CompilerLog log = parse_log(compiled.image.log);
    if (log.kernels.empty()) log.kernels.emplace_back();
    std::string warnings;
    for (const std::string& warning : log.warnings) warnings += (warnings.empty() ? "" : ", ") + quoted(warning);
    std::string_view compiler = compiled.image.about;  // "fwd_simt.cu sm_80 NVRTC 13.0"
    const auto word = [&compiler] {
        const size_t end = std::min(compiler.find(' '), compiler.size());
        const std::string_view first = compiler.substr(0, end);
        compiler.remove_prefix(std::min(end + 1, compiler.size()));
        return first;
    };
    word();
    const std::string_view arch = word();
    std::string_view rendered;
    for (const jit::Header& header : source.headers) {
        if (header.name == "spec.cuh") rendered = header.text;
    }
    std::string lines;
    for (const KernelResources& kernel : log.kernels) {
        const bool first = &kernel == log.kernels.data();
        std::array<char, 32> seconds{};
        std::snprintf(seconds.data(), seconds.size(), "%.4f", first ? compiled.seconds : 0.0);
        lines += Line()
                     .text("family", family.name)
                     .text("file", source.name)
                     .text("entry", kernel.entry)
                     .text("arch", arch)
                     .text("compiler", compiler)
                     .known("registers", kernel.registers)
                     .known("shared_bytes", kernel.shared_bytes)
                     .known("stack_bytes", kernel.stack_bytes)
                     .known("spill_store_bytes", kernel.spill_store_bytes)
                     .known("spill_load_bytes", kernel.spill_load_bytes)
                     .known("local_bytes", kernel.local_bytes)
                     .number("image_bytes", static_cast<int64_t>(compiled.image.bytes.size()))
                     .raw("seconds", seconds.data())
                     .raw("from_cache", compiled.from_cache ? "true" : "false")
                     .raw("warnings", first ? "[" + warnings + "]" : "[]")
                     .text("path", compiled.path)
                     .text("rendered", first ? rendered : "")
                     .str();
    }
    return lines;
}

// The number in front of `what`: "Used 40 registers, 8 bytes smem".
int number_before(std::string_view line, std::string_view what) {
    const size_t at = line.find(what);
    if (at == std::string_view::npos) return -1;
    size_t begin = at;
    while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
    int value = -1;
    std::from_chars(line.data() + begin, line.data() + at, value);
    return value;
}

jit::Cache cache_in(const std::string& directory) {
    return directory.empty() ? jit::user_cache() : jit::Cache(directory, UINT64_MAX);
}

}  // namespace

CompilerLog parse_log(const std::string& log) {
    CompilerLog out;
    KernelResources* kernel = nullptr;
    for (size_t at = 0; at < log.size();) {
        const size_t end = std::min(log.find('\n', at), log.size());
        const std::string_view line = std::string_view(log).substr(at, end - at);
        at = end + 1;
        const auto has = [line](std::string_view text) { return line.find(text) != std::string_view::npos; };
        constexpr std::string_view kEntry = "Compiling entry function '";
        if (const size_t name = line.find(kEntry); name != std::string_view::npos) {
            const std::string_view rest = line.substr(name + kEntry.size());
            kernel = &out.kernels.emplace_back();
            kernel->entry = rest.substr(0, rest.find('\''));
        } else if (has(" bytes stack frame")) {
            // Functions that were not inlined have lines of their own.
            if (kernel == nullptr) continue;
            kernel->stack_bytes = std::max(kernel->stack_bytes, number_before(line, " bytes stack frame"));
            kernel->spill_store_bytes =
                std::max(kernel->spill_store_bytes, 0) + std::max(number_before(line, " bytes spill stores"), 0);
            kernel->spill_load_bytes =
                std::max(kernel->spill_load_bytes, 0) + std::max(number_before(line, " bytes spill loads"), 0);
        } else if (has(": Used ") && has(" registers")) {
            if (kernel == nullptr) continue;
            kernel->registers = number_before(line, " registers");
            kernel->shared_bytes = std::max(number_before(line, " bytes smem"), 0);
            kernel->stack_bytes = std::max(kernel->stack_bytes, number_before(line, " bytes cumulative stack size"));
            kernel->local_bytes = std::max({number_before(line, " bytes lmem"), kernel->stack_bytes, 0});
        } else if (!has("Function properties for ") && !has("Compile time = ") && !has(" bytes gmem") &&
                   line.find_first_not_of(" \t\r") != std::string_view::npos) {
            out.warnings.emplace_back(line);
        }
    }
    return out;
}

std::string compile_ahead(const Problem& p, Pass pass, const std::string& arch, const std::string& directory) {
    Arch gpu;
    int driver_version = 0;
    if (arch.empty()) {
        const DeviceInfo& device = device_info(p.device.index);
        gpu = {device.major, device.minor, false};
        driver_version = device.driver_version;
    } else {
        gpu = Arch::parse(arch);
    }
    auto [family, sources] = choose(p, pass, gpu);
    // The same for all problems: lengths in arrays and masks of arrays need them.
    for (const char* file : {"prepare.cu", "summaries.cu"}) sources.push_back(jit::plain_source(file));
    std::string lines;
    for (const jit::Source& source : sources)
        lines += report(*family, source,
                        jit::compile_ahead(source, gpu, arch.starts_with("compute_"), driver_version, directory));
    return lines;
}

std::string list_compiled(const std::string& directory, bool verify) {
    const jit::Cache cache = cache_in(directory);
    // UINT64_MAX is no number that JSON readers take.
    std::string lines =
        Line()
            .text("directory", cache.directory())
            .raw("max_bytes", cache.max_bytes() == UINT64_MAX ? "null" : std::to_string(cache.max_bytes()))
            .str();
    for (const jit::CacheEntry& entry : verify ? cache.verify() : cache.ls()) {
        lines += Line()
                     .text("key", entry.key)
                     .text("about", entry.about)
                     .number("bytes", static_cast<int64_t>(entry.bytes))
                     .number("last_use", entry.last_use)
                     .text("problem", entry.problem)
                     .str();
    }
    return lines;
}

uint64_t clear_compiled(const std::string& directory) { return cache_in(directory).clear(); }

}  // namespace tilewise::cuda
