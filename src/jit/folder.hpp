// What lies in a folder.
#pragma once

#include <string>
#include <vector>

namespace tilewise::jit {

std::vector<std::string> names_in(
    const std::string& directory);  // sorted, . and .. among them; none if it is not there

}  // namespace tilewise::jit
