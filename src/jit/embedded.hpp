// The table that cmake/embed.cmake fills.
#pragma once

#include <span>
#include <string_view>

namespace tilewise::jit {

struct EmbeddedFile {
    std::string_view name, text;
};
std::span<const EmbeddedFile> embedded_files();

}  // namespace tilewise::jit
