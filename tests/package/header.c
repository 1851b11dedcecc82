#include <tilewise/tilewise.h>

const char* version_of_header(void) { return TILEWISE_VERSION_STRING; }
