#include "source.hpp"

#include "core/error.hpp"
#include "embedded.hpp"

namespace tilewise::jit {

std::string_view kernel_text(std::string_view file) {
    for (const EmbeddedFile& entry : embedded_files()) {
        if (entry.name == file) return entry.text;
    }
    throw core::Error(core::Status::internal, "no kernel text named " + std::string(file) + " is in this library");
}

std::vector<std::string> kernel_files() {
    std::vector<std::string> names;
    for (const EmbeddedFile& entry : embedded_files()) names.emplace_back(entry.name);
    return names;
}

std::string key_material(const Source& source, const Target& target, std::string_view compiler) {
    // Lengths make the parts unmistakable. The number is that of this list and of what compile() adds to it.
    std::string text = "tilewise-kernel-2\n";
    const auto add = [&text](std::string_view part) {
        text += std::to_string(part.size());
        text += ':';
        text += part;
        text += '\n';
    };
    add(target.ptx ? target.arch.virtual_name() : target.arch.name());
    add(compiler);
    add(source.name);
    add(source.text);
    add(std::to_string(source.options.size()));
    for (const std::string& option : source.options) add(option);
    for (const Header& header : source.headers) {
        add(header.name);
        add(header.text);
    }
    return text;
}

}  // namespace tilewise::jit
