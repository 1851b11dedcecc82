// Uses the installed library through the C++ header alone.
#include <cstdio>
#include <tilewise/tilewise.hpp>

int main() {
    std::printf("consumer: tilewise %s\n", TILEWISE_VERSION_STRING);
    return 0;
}
