// Every environment variable the library reads. env.cpp holds the only getenv.
#pragma once

#include <string>
#include <vector>

namespace tilewise::core {

struct EnvVariable {
    const char* name;
    const char* meaning;
};
const std::vector<EnvVariable>& env_variables();

// Value, or "" if unset. Only names from the table.
std::string env(const char* name);

}  // namespace tilewise::core
