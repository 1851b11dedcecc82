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

// A constant of a kernel family, for tuning: what TILEWISE_CONFIG says of it, else the fallback. Read once per process;
// throws Error for a text that is not family:name=value,name=value;family:...
int tuned(const std::string& family, const std::string& name, int fallback);

}  // namespace tilewise::core
