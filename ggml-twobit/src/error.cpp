#include "error.h"

#include "twobit.h"

#include <cstdarg>
#include <cstdio>

static thread_local char last_error[512];

int tb_set_error(const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    for (char * c = last_error; *c; c++) {
        if (*c == '\n' || *c == '\r') {
            *c = ' ';
        }
    }
    return -1;
}

const char * twobit_last_error(void) {
    return last_error;
}
